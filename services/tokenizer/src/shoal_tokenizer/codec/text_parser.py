"""Generated ids of a model without reasoning or tool grammar -> text, cut at stop strings.

What comes out depends on the tokens only, never on how they were batched, so that a replayed stream goes on exactly
where it broke. Withheld are at most three bytes of an unfinished character and the longest end of the text that may
still become a stop string. An unfinished character at the end of an answer is dropped: it was cut, not generated.
"""

from codecs import utf_8_decode
from collections.abc import Sequence

from shoal_tokenizer.codec.api import Delta, ShownToken, Text, TokenLogprob
from shoal_tokenizer.codec.vocabulary import Vocabulary

NO_LOGPROB = TokenLogprob(-9999.0, (), ())  # what OpenAI writes for a token without a known probability


class TextParser:
    """``OutputParser`` of one answer; used by one task."""

    __slots__ = (
        "_characters",
        "_pending",
        "_seen_chars",
        "_shown_chars",
        "_stops",
        "_vocabulary",
        "_wants_tokens",
        "completion_tokens",
        "reasoning_tokens",
        "stop_string",
    )

    def __init__(self, vocabulary: Vocabulary, stop_strings: Sequence[str], wants_tokens: bool) -> None:
        self.stop_string: str | None = None
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._vocabulary = vocabulary
        self._stops = StopStrings(stop_strings) if stop_strings else None
        self._wants_tokens = wants_tokens
        self._characters = Characters(vocabulary.is_first_space_dropped)
        self._pending = PendingTokens()
        self._seen_chars = 0
        self._shown_chars = 0

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Delta:
        if self.stop_string is not None:
            return Delta()
        if self._stops is None and not self._wants_tokens:
            self.completion_tokens += len(token_ids)
            return _delta(self._characters.push(self._vocabulary.join(token_ids)))
        text = ""
        for index, token_id in enumerate(token_ids):
            logprob = logprobs[index] if index < len(logprobs) else NO_LOGPROB
            text += self._push_one(token_id, logprob)
            if self.stop_string is not None:
                break
        self._shown_chars += len(text)
        return _delta(text, [token for _start, token in self._pending.take(self._shown_chars)])

    def close(self, *, is_cut: bool = True) -> Delta:
        if self.stop_string is not None:
            return Delta()
        text = self._stops.rest() if self._stops is not None else ""
        return _delta(text, [token for _start, token in self._pending.take(None)])

    def _push_one(self, token_id: int, logprob: TokenLogprob) -> str:
        self.completion_tokens += 1
        start = self._seen_chars
        text = self._characters.push(self._vocabulary.join((token_id,)))
        self._seen_chars += len(text)
        if self._wants_tokens:
            self._pending.put(start, show_token(self._vocabulary, token_id, logprob))
        if self._stops is None:
            return text
        text, self.stop_string = self._stops.push(text)
        return text


def _delta(text: str, tokens: list[ShownToken] | None = None) -> Delta:
    return Delta([Text(text)] if text else [], tokens or [])


def show_token(vocabulary: Vocabulary, token_id: int, logprob: TokenLogprob) -> ShownToken:
    """A generated token and its likeliest rivals, spelled out."""
    spelling = vocabulary.spelling
    top = [(spelling(i), p) for i, p in zip(logprob.top_ids, logprob.top_logprobs, strict=False)]
    return ShownToken(spelling(token_id), logprob.logprob, top)


class Characters:
    """Bytes -> text. Holds back the bytes of an unfinished character, three at most."""

    __slots__ = ("_held", "_is_first_space_due")

    def __init__(self, is_first_space_dropped: bool) -> None:
        self._held = b""
        self._is_first_space_due = is_first_space_dropped

    def push(self, added: bytes) -> str:
        added = self._held + added
        text, used = utf_8_decode(added, "replace", False)
        self._held = added[used:]
        if self._is_first_space_due and text:
            self._is_first_space_due = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """No more bytes of the unfinished character come."""
        held, self._held = self._held, b""
        return utf_8_decode(held, "replace", True)[0]


class PendingTokens:
    """Tokens that wait until it is known whether their text is shown: (first character of it, token)."""

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens: list[tuple[int, ShownToken]] = []

    def put(self, start: int, token: ShownToken) -> None:
        self._tokens.append((start, token))

    def take(self, end: int | None) -> list[tuple[int, ShownToken]]:
        """Those that begin before the character ``end``; None: all."""
        tokens = self._tokens
        count = len(tokens)
        if end is not None:
            count = next((n for n, (start, _token) in enumerate(tokens) if start >= end), count)
        taken = tokens[:count]
        del tokens[:count]
        return taken


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
        keep = max(longest_end(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def rest(self) -> str:
        """What was withheld, when no more comes."""
        held, self._held = self._held, ""
        return held


def longest_end(text: str, beginning: str) -> int:
    """Length of the longest end of ``text`` that begins ``beginning``, or is all of it."""
    if not beginning:
        return 0
    position = text.find(beginning[0], max(0, len(text) - len(beginning)))
    while position >= 0:
        if beginning.startswith(text[position:]):
            return len(text) - position
        position = text.find(beginning[0], position + 1)
    return 0
