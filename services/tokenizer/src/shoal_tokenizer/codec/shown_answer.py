"""What a parser that knows more than text decided to show of an answer: parts of a delta, cut at stop strings."""

from collections.abc import Sequence

from shoal_tokenizer.codec.api import CallArguments, Delta, Part, Reasoning, ShownToken, Text
from shoal_tokenizer.codec.text_parser import PendingTokens, StopStrings


class ShownAnswer:
    """Collects the parts of a delta; finds stop strings in the text."""

    __slots__ = ("_parts", "_pending", "_seen_chars", "_shown_chars", "_stops", "_tokens", "stop_string")

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self.stop_string: str | None = None
        self._stops = StopStrings(stop_strings) if stop_strings else None
        self._parts: list[Part] = []
        self._tokens: list[ShownToken] = []
        self._pending = PendingTokens()
        self._seen_chars = 0
        self._shown_chars = 0

    def show(self, text: str, tokens: Sequence[tuple[int, ShownToken]]) -> None:
        """A piece of the answer's text; the end of it may be withheld as the beginning of a stop string."""
        for offset, token in tokens:
            self._pending.put(self._seen_chars + offset, token)
        self._seen_chars += len(text)
        if self._stops is not None:
            text, self.stop_string = self._stops.push(text)
        self._show_text(text)

    def end_text(self) -> None:
        """No stop string goes on in what follows."""
        if self._stops is not None and self.stop_string is None:
            self._show_text(self._stops.rest())

    def think(self, text: str) -> None:
        if not text:
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Reasoning):
            self._parts[-1] = Reasoning(last.text + text)
        else:
            self._parts.append(Reasoning(text))

    def call(self, new: Sequence[Part]) -> None:
        """Parts of a call, and text that stood around it."""
        parts = self._parts
        for part in new:
            last = parts[-1] if parts else None
            if isinstance(part, CallArguments) and isinstance(last, CallArguments):
                parts[-1] = CallArguments(last.text + part.text)
            else:
                parts.append(part)

    def take(self) -> Delta:
        delta = Delta(self._parts, self._tokens)
        self._parts, self._tokens = [], []
        return delta

    def _show_text(self, text: str) -> None:
        self._shown_chars += len(text)
        self._tokens += [token for _start, token in self._pending.take(self._shown_chars)]
        if not text:
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Text):
            self._parts[-1] = Text(last.text + text)
        else:
            self._parts.append(Text(text))
