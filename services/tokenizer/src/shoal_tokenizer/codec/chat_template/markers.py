"""Cutting a rendered prompt at its control tokens.

Only what the template's author wrote is searched for control tokens; all text between two of them, whoever wrote
it, is one segment without any, so that ids equal those of a reference tokenizer on the whole prompt.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_tokenizer.codec.api import Segment
from shoal_tokenizer.codec.chat_template.prompt_text import PromptText
from shoal_tokenizer.codec.chat_template.tag import Tag


@dataclass(frozen=True, slots=True)
class _Marker:
    takes_left_space: bool
    takes_right_space: bool
    is_whole_word: bool
    is_text: bool  # a run of spaces: ordinary text with an id of its own, whoever wrote it


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
        self._ids = {token["content"]: token["id"] for token in added_tokens if "id" in token}
        longest_first = sorted(self._by_text, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._has_text_markers = any(marker.is_text for marker in self._by_text.values())

    def tag(self, text: str) -> Tag:
        """``text`` as a mark in answers: the token of that spelling where there is one."""
        return Tag(text, self._ids.get(text))

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
