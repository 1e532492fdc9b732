"""What of generated ids recipe's stream processor gets: whole characters.

It holds back the bytes of an unfinished character for as long as none is finished, which hostile sampling makes a whole
answer of, and looks at all of them again with each token. So an unfinished character is held here, three bytes at
most; what turns out to be none is given to recipe as the text of a replacement character. The token that ends a turn
and ids without a spelling are left out.
"""

from codecs import utf_8_decode
from collections.abc import Sequence

import deepseek_recipe as recipe

from shoal_tokenizer.codec.vocabulary import Vocabulary

_WHOLE, _PARTIAL, _LEFT_OUT = range(3)
_REPLACEMENT = "�"


class TokenKinds:
    """Of each id of a vocabulary, whether it is whole characters."""

    def __init__(self, vocabulary: Vocabulary, left_out: Sequence[int]) -> None:
        self.spelled = vocabulary.spelled
        kinds = bytearray(map(_kind, vocabulary.spelled))
        for token_id in left_out:
            kinds[token_id] = _LEFT_OUT
        self._kinds = bytes(kinds)

    def are_whole(self, token_ids: Sequence[int]) -> bool:
        try:
            return not any(map(self._kinds.__getitem__, token_ids))
        except IndexError:
            return False

    def is_left_out(self, token_id: int) -> bool:
        return token_id >= len(self._kinds) or self._kinds[token_id] == _LEFT_OUT

    def is_partial(self, token_id: int) -> bool:
        return self._kinds[token_id] == _PARTIAL


def _kind(spelling: bytes) -> int:
    if not spelling:
        return _LEFT_OUT
    text = spelling.decode(errors="replace")
    return _PARTIAL if _REPLACEMENT in text else _WHOLE


class Feed:
    """Of one answer. ``numbers``: give each token its number as log probability, by which its text is found again."""

    __slots__ = ("_count", "_held", "_held_ids", "_is_begun", "_kinds", "_numbers", "replaced")

    def __init__(self, kinds: TokenKinds, *, numbers: bool) -> None:
        self.replaced: list[int] = []  # numbers of tokens that went as text; only with ``numbers``
        self._kinds = kinds
        self._numbers = numbers
        self._count = 0
        self._held = b""
        self._held_ids: list[tuple[int, int]] = []  # number, id
        self._is_begun = False  # the first of the held tokens was shown in part

    def push(self, token_ids: Sequence[int]) -> list[recipe.InferenceChunk]:
        if not self._held and self._kinds.are_whole(token_ids):
            first, self._count = self._count, self._count + len(token_ids)
            return [self._tokens(token_ids, range(first, self._count))]
        chunks: list[recipe.InferenceChunk] = []
        for token_id in token_ids:
            number, self._count = self._count, self._count + 1
            if self._kinds.is_left_out(token_id):
                continue
            if self._kinds.is_partial(token_id):
                chunks += self._push_partial(number, token_id)
                continue
            if self._held:
                text, _used = utf_8_decode(self._held, "replace", True)
                chunks.append(self._text(text))
            chunks.append(self._tokens((token_id,), (number,)))
        return chunks

    def _push_partial(self, number: int, token_id: int) -> list[recipe.InferenceChunk]:
        self._held += self._kinds.spelled[token_id]
        self._held_ids.append((number, token_id))
        text, used = utf_8_decode(self._held, "replace", False)
        rest = self._held[used:]
        if not rest:
            return [self._whole(text)]
        if not text:
            return []
        # What is left belongs to this token alone: it is what broke the character before, or ended it.
        last = self._held_ids.pop()
        chunk = self._text(text)
        self._held, self._held_ids, self._is_begun = rest, [last], True
        return [chunk]

    def _whole(self, text: str) -> recipe.InferenceChunk:
        if self._is_begun or _REPLACEMENT in text:
            return self._text(text)
        numbers, token_ids = zip(*self._held_ids, strict=True)
        self._held, self._held_ids = b"", []
        return self._tokens(token_ids, numbers)

    def _text(self, text: str) -> recipe.InferenceChunk:
        """The held tokens, as text."""
        if self._numbers:
            self.replaced += [number for number, _token_id in self._held_ids]
        chunk = recipe.InferenceChunk.text(text, len(self._held_ids))
        self._held, self._held_ids, self._is_begun = b"", [], False
        return chunk

    def _tokens(self, token_ids: Sequence[int], numbers: Sequence[int]) -> recipe.InferenceChunk:
        logprobs = [(float(number), ()) for number in numbers] if self._numbers else None
        return recipe.InferenceChunk.tokens(token_ids, logprobs)
