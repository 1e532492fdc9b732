"""Cutting a rendered prompt at its control tokens, and encoding the pieces.

Only what the template's author wrote is searched for control tokens; all text between two of them, whoever wrote
it, is one segment without any, so that ids equal those of a reference tokenizer on the whole prompt.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fastokens

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1.common_pb2 import CONTEXT_LENGTH_EXCEEDED, INVALID_REQUEST
from shoal_tokenizer.codec.api import Segment
from shoal_tokenizer.codec.prompt_text import PromptText

PORTION_CHARS = 32_768  # about ten milliseconds, also of the worst text


@dataclass(frozen=True, slots=True)
class _Marker:
    takes_left_space: bool
    takes_right_space: bool
    is_whole_word: bool
    is_text: bool  # a run of spaces: ordinary text with an id of its own, whoever wrote it


@dataclass(frozen=True, slots=True)
class PromptBound:
    """What cannot fit into the model's context however it is encoded: a token has only so many characters.

    Encoding takes seconds for megabytes of hostile text; what is refused by its length alone costs nothing.
    """

    context_tokens: int
    token_chars: int  # of the longest token

    def check(self, chars: int) -> None:
        """BadRequest (CONTEXT_LENGTH_EXCEEDED) for a prompt of so many characters that it cannot fit."""
        least_tokens = chars // self.token_chars
        if least_tokens > self.context_tokens:
            raise BadRequest(
                CONTEXT_LENGTH_EXCEEDED,
                f"This model's maximum context length is {self.context_tokens} tokens. However, your messages have "
                f"{chars} characters, which are {least_tokens} tokens at least. Please reduce the length of the "
                "messages.",
                param="messages",
            )


class Markers:
    """The added tokens of a tokenizer, found as its reference implementation finds them: leftmost, longest."""

    def __init__(self, added_tokens: Sequence[Mapping[str, Any]]) -> None:
        self._by_text = {
            token["content"]: _Marker(
                bool(token.get("lstrip")),
                bool(token.get("rstrip")),
                bool(token.get("single_word")),
                not token.get("special") and not token["content"].strip(),
            )
            for token in added_tokens
            if token["content"]
        }
        longest_first = sorted(self._by_text, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._has_text_markers = any(marker.is_text for marker in self._by_text.values())

    def cut(self, text: PromptText) -> list[Segment]:
        """Alternate text without control tokens and single control tokens."""
        plain = str.__str__(text)
        segments: list[Segment] = []
        end = 0
        for match in self._find(plain, text.ranges):
            marker = self._by_text[match.group()]
            start, stop = match.span()
            if start < end or (marker.is_whole_word and _touches_word(plain, start, stop)):
                continue
            while marker.takes_left_space and start > end and plain[start - 1].isspace():
                start -= 1
            while marker.takes_right_space and stop < len(plain) and plain[stop].isspace():
                stop += 1
            if start > end:
                segments.append((plain[end:start], False))
            segments.append((match.group(), True))
            end = stop
        if end < len(plain):
            segments.append((plain[end:], False))
        return segments

    def _find(self, text: str, ranges: Sequence[tuple[int, int]]) -> Iterator[re.Match[str]]:
        if self._pattern is None:
            return
        if not self._has_text_markers:
            for a, b in ranges:
                yield from self._pattern.finditer(text, a, b)
            return
        starts = [a for a, _b in ranges]
        for match in self._pattern.finditer(text):
            before = bisect_right(starts, match.start()) - 1
            is_authors = before >= 0 and match.end() <= ranges[before][1]
            if is_authors or self._by_text[match.group()].is_text:
                yield match


def _touches_word(text: str, start: int, stop: int) -> bool:
    return bool(re.match(r"\w", text[start - 1 : start]) or re.match(r"\w", text[stop : stop + 1]))


class FastEncoder:
    """``SegmentEncoder`` on fastokens; shared by all threads.

    fastokens holds the interpreter's lock while it encodes segments, and with it the loop that formats answers; it
    lets go of it for one ordinary text. So segments are given to it in portions, and a long text by itself.
    """

    def __init__(self, tokenizer: fastokens.Tokenizer, bound: PromptBound | None = None) -> None:
        self._tokenizer = tokenizer
        self._bound = bound

    def encode(self, segments: Sequence[Segment]) -> list[int]:
        if self._bound is not None:
            self._bound.check(sum(len(text) for text, _is_control in segments))
        ids: list[int] = []
        try:
            for portion in _portions(segments):
                ids += self._encode_portion(portion)
        except ValueError as error:  # fastokens: its expressions gave up, as on a million spaces in a row
            raise BadRequest(
                INVALID_REQUEST,
                "The messages have a run of characters that is too long to be split into tokens.",
                param="messages",
            ) from error
        return ids

    def _encode_portion(self, portion: Sequence[Segment]) -> list[int]:
        text, is_control = portion[0]
        if len(text) > PORTION_CHARS and not is_control:
            ids: list[int] = self._tokenizer.encode_ordinary(text).ids
        else:
            ids = self._tokenizer.encode_segments(list(portion)).ids
        return ids


def _portions(segments: Sequence[Segment]) -> Iterator[Sequence[Segment]]:
    """Runs of segments of ``PORTION_CHARS`` together; a longer segment is a portion of its own."""
    start, chars = 0, 0
    for index, (text, _is_control) in enumerate(segments):
        if index > start and chars + len(text) > PORTION_CHARS:
            yield segments[start:index]
            start, chars = index, 0
        chars += len(text)
    if start < len(segments):
        yield segments[start:]
