"""Decoded text of an answer that nothing is known of yet."""

from collections.abc import Mapping

from shoal_tokenizer.codec.api import ShownToken, TokenLogprob
from shoal_tokenizer.codec.chat_template.tag import Tag
from shoal_tokenizer.codec.text_parser import Characters, PendingTokens, show_token
from shoal_tokenizer.codec.vocabulary import Vocabulary


class HeldText:
    """Text of tokens that waits for a decision. Knows where in it a tag is a token."""

    __slots__ = ("_characters", "_dropped_chars", "_pending", "_tags", "_tags_of_tokens", "_vocabulary", "text")

    def __init__(self, vocabulary: Vocabulary, tags_of_tokens: Mapping[int, Tag], *, wants_tokens: bool) -> None:
        self.text = ""
        self._vocabulary = vocabulary
        self._tags_of_tokens = tags_of_tokens
        self._characters = Characters(vocabulary.is_first_space_dropped)
        self._pending = PendingTokens() if wants_tokens else None
        self._tags: list[tuple[int, Tag]] = []
        self._dropped_chars = 0

    def add(self, token_id: int, logprob: TokenLogprob) -> None:
        start = self._dropped_chars + len(self.text)
        tag = self._tags_of_tokens.get(token_id)
        if tag is None:
            self.text += self._characters.push(self._vocabulary.join((token_id,)))
        else:
            self.text += self._characters.flush()
            self._tags.append((self._dropped_chars + len(self.text), tag))
            self.text += tag.text
        if self._pending is not None:
            self._pending.put(start, show_token(self._vocabulary, token_id, logprob))

    def find(self, tag: Tag) -> int:
        """Where the tag begins; -1: nowhere."""
        if tag.token_id is None:
            return self.text.find(tag.text)
        return next((place - self._dropped_chars for place, found in self._tags if found is tag), -1)

    def drop(self, chars: int) -> str:
        """It is decided what the first characters are; their tokens are forgotten."""
        dropped, self.text = self.text[:chars], self.text[chars:]
        self._dropped_chars += chars
        while self._tags and self._tags[0][0] < self._dropped_chars:
            del self._tags[0]
        if self._pending is not None:
            self._pending.take(self._dropped_chars)
        return dropped

    def take_tokens(self, chars: int) -> list[tuple[int, ShownToken]]:
        """The tokens that begin in the first characters, and where; before these are dropped."""
        if self._pending is None:
            return []
        taken = self._pending.take(self._dropped_chars + chars)
        return [(max(0, start - self._dropped_chars), token) for start, token in taken]
