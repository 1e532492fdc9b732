"""Generated ids of a model without reasoning or tool grammar -> text, cut at stop strings.

What comes out depends on the tokens only, never on how they were batched, so that a replayed stream goes on exactly
where it broke. Withheld are at most three bytes of an unfinished character and the longest end of the text that may
still become a stop string. An unfinished character at the end of an answer is dropped: it was cut, not generated.
"""

from codecs import utf_8_decode
from collections.abc import Sequence

from shoal_tokenizer.codec.api import Delta, ShownToken, TokenLogprob
from shoal_tokenizer.codec.vocabulary import Vocabulary

_NO_LOGPROB = TokenLogprob(-9999.0, (), ())  # what OpenAI writes for a token without a known probability


class TextParser:
    """``OutputParser`` of one answer; used by one task."""

    __slots__ = (
        "_held_bytes",
        "_is_first_space_due",
        "_pending",
        "_seen_chars",
        "_shown_chars",
        "_stops",
        "_vocabulary",
        "_wants_tokens",
        "completion_tokens",
        "stop_string",
    )

    def __init__(self, vocabulary: Vocabulary, stop_strings: Sequence[str], wants_tokens: bool) -> None:
        self.stop_string: str | None = None
        self.completion_tokens = 0
        self._vocabulary = vocabulary
        self._stops = StopStrings(stop_strings) if stop_strings else None
        self._wants_tokens = wants_tokens
        self._held_bytes = b""
        self._is_first_space_due = vocabulary.is_first_space_dropped
        # Tokens whose text is withheld wait for it: (first character of the token's text, token).
        self._pending: list[tuple[int, ShownToken]] = []
        self._seen_chars = 0
        self._shown_chars = 0

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Delta:
        if self.stop_string is not None:
            return Delta()
        if self._stops is None and not self._wants_tokens:
            self.completion_tokens += len(token_ids)
            return Delta(self._decode(self._vocabulary.join(token_ids)))
        text = ""
        for index, token_id in enumerate(token_ids):
            logprob = logprobs[index] if index < len(logprobs) else _NO_LOGPROB
            text += self._push_one(token_id, logprob)
            if self.stop_string is not None:
                break
        self._shown_chars += len(text)
        return Delta(text, self._take_shown())

    def close(self) -> Delta:
        text = ""
        if self._stops is not None and self.stop_string is None:
            text = self._stops.rest()
        tokens = [token for _start, token in self._pending] if self.stop_string is None else []
        self._pending = []
        return Delta(text, tokens)

    def _push_one(self, token_id: int, logprob: TokenLogprob) -> str:
        self.completion_tokens += 1
        start = self._seen_chars
        text = self._decode(self._vocabulary.join((token_id,)))
        self._seen_chars += len(text)
        if self._wants_tokens:
            self._pending.append((start, self._show(token_id, logprob)))
        if self._stops is None:
            return text
        text, self.stop_string = self._stops.push(text)
        return text

    def _show(self, token_id: int, logprob: TokenLogprob) -> ShownToken:
        spelling = self._vocabulary.spelling
        top = [(spelling(i), p) for i, p in zip(logprob.top_ids, logprob.top_logprobs, strict=False)]
        return ShownToken(spelling(token_id), logprob.logprob, top)

    def _take_shown(self) -> list[ShownToken]:
        """Tokens that began before the end of what was shown; the rest waits for its text."""
        count = 0
        while count < len(self._pending) and self._pending[count][0] < self._shown_chars:
            count += 1
        shown = [token for _start, token in self._pending[:count]]
        del self._pending[:count]
        return shown

    def _decode(self, new_bytes: bytes) -> str:
        new_bytes = self._held_bytes + new_bytes
        text, used = utf_8_decode(new_bytes, "replace", False)
        self._held_bytes = new_bytes[used:]
        if self._is_first_space_due and text:
            self._is_first_space_due = False
            return text.removeprefix(" ")
        return text


class StopStrings:
    """Finds whichever stop string is complete first, in text that comes in pieces."""

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """What may be shown now, and the stop string if one is complete: then nothing after it is shown."""
        text = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            self._held = ""
            return text[: best[1]], best[2]
        keep = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def rest(self) -> str:
        """What was withheld, when no more comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of ``text`` that begins ``stop``."""
        position = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while position >= 0:
            if stop.startswith(text[position:]):
                return len(text) - position
            position = text.find(stop[0], position + 1)
        return 0
