"""Reading a call that is one JSON object with a name and arguments.

Arguments come out as they are generated once the name stands before them. A call in another order, or whose arguments
are no object, is read when it is whole. What is no call at all is text.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from shoal_tokenizer.codec.api import CallArguments, CallBegin, CallEnd, Part, Text
from shoal_tokenizer.codec.arguments import ArgumentsGuard
from shoal_tokenizer.codec.chat_template.calls import MAX_HELD_CHARS, MAX_NAME_CHARS, read_tail

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"((?:[^"\\\x00-\x1f]|\\.)*)"')
_ARGUMENT_KEYS = ('"arguments"', '"parameters"')
_CALL_KEYS = {"type", "id", "name", "arguments", "parameters"}  # with another one it would be lost
_MAX_HEAD_CHARS = 4 * MAX_NAME_CHARS


class _Undecided(Exception):
    """More text decides."""


class _NoHead(Exception):
    """It does not begin as a call does."""


class _Head:
    """Reads ``{"name": "…", "arguments": `` up to the object; a type of function may stand before the name."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read(self) -> tuple[str, int]:
        """The name, and where the arguments begin. Raises _Undecided and _NoHead."""
        self._one_of("{")
        if self._one_of('"name"', '"type"') == '"type"':
            self._one_of(":")
            self._one_of('"function"')
            self._one_of(",")
            self._one_of('"name"')
        self._one_of(":")
        name = self._string()
        self._one_of(",")
        self._one_of(*_ARGUMENT_KEYS)
        self._one_of(":")
        self._one_of("{")
        return name, self._at - 1

    def _one_of(self, *expected: str) -> str:
        self._skip_space()
        for text in expected:
            if self._text.startswith(text, self._at):
                self._at += len(text)
                return text
        left = self._text[self._at :]
        if any(text.startswith(left) for text in expected):
            raise _Undecided
        raise _NoHead

    def _string(self) -> str:
        self._skip_space()
        match = _STRING.match(self._text, self._at)
        if match is None:
            if self._text[self._at : self._at + 1] not in ("", '"'):
                raise _NoHead
            raise _Undecided
        self._at = match.end()
        name = _read_name(match.group())
        if name is None:
            raise _NoHead
        return name

    def _skip_space(self) -> None:
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()


def _read_name(literal: str) -> str | None:
    try:
        name = json.loads(literal)
    except ValueError:
        return None
    return name if is_name(name) else None


def is_name(name: object) -> bool:
    """Whether it can be told to a client as the name of a function."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()


class _ObjectEnd:
    """Finds where a JSON object ends that comes in pieces: at its last brace, or where the closing tag stands."""

    def __init__(self, end_text: str | None) -> None:
        self._end_text = end_text
        marks = r'["\\{}\[\]]' + (f"|{re.escape(end_text[0])}" if end_text else "")
        self._outside = re.compile(marks)
        self._inside = re.compile(r'["\\]')
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def push(self, text: str) -> tuple[int, bool]:
        """How much of the text is decided, and whether the object ends there. The rest must be pushed again."""
        at = 0
        if self._is_escaped and text:
            self._is_escaped, at = False, 1
        while match := (self._inside if self._in_string else self._outside).search(text, at):
            at = match.end()
            mark = match.group()
            if mark == '"':
                self._in_string = not self._in_string
            elif mark == "\\":
                self._is_escaped, at = at == len(text), min(at + 1, len(text))
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at, True
            elif (found := self._at_end_text(text, match.start())) is not None:
                return match.start(), found
        return len(text), False

    def _at_end_text(self, text: str, at: int) -> bool | None:
        """True where the closing tag stands, False where it may, None where it does not."""
        assert self._end_text is not None
        left = text[at : at + len(self._end_text)]
        return None if not self._end_text.startswith(left) else left == self._end_text


class JsonCallReader:
    """``CallReader``. ``names``: only calls of these are calls, and nothing is waited for that does not begin so."""

    def __init__(self, end_text: str | None, names: frozenset[str] | None = None, *, has_end: bool = True) -> None:
        self.is_begun = self.is_text = self.is_over = False
        self.rest = ""
        self._end_text = end_text
        self._names = names
        self._has_end = has_end
        self._held = ""
        self._step: Callable[[list[Part]], bool] = self._in_head
        self._guard = ArgumentsGuard()
        self._object_end = _ObjectEnd(end_text)

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def end(self) -> list[Part]:
        if not self.is_begun:
            return self._read_whole()
        parts: list[Part] = []
        if self._step == self._in_arguments:
            self._show(parts, self._held)
            self._end_arguments(parts)
            self._held = ""
        junk = read_tail(self._held, "}", None)[1].strip()
        self.is_over = True
        return [*parts, Text(junk)] if junk else parts

    def close(self) -> list[Part]:
        if self.is_begun:
            return self.end() if self._step == self._in_tail else []
        return self._read_whole()

    def _in_head(self, parts: list[Part]) -> bool:
        try:
            name, start = _Head(self._held).read()
        except _Undecided:
            self.is_text = len(self._held) > _MAX_HEAD_CHARS
            return False
        except _NoHead:
            self.is_text = self._names is not None or not self._held.lstrip().startswith("{")
            self._step = self._in_whole
            return not self.is_text
        if self._names is not None and name not in self._names:
            self.is_text = True
            return False
        self.is_begun = True
        parts.append(CallBegin(name))
        self._held = self._held[start:]
        self._step = self._in_arguments
        return True

    def _in_whole(self, parts: list[Part]) -> bool:
        place = self._held.find(self._end_text) if self._end_text else -1
        if place >= 0:
            assert self._end_text is not None
            held, self._held = self._held, self._held[:place]
            parts += self._read_whole()
            self._held, self.rest = held, held[place + len(self._end_text) :]
        elif len(self._held) > MAX_HELD_CHARS:
            self.is_text = True
        return False

    def _in_arguments(self, parts: list[Part]) -> bool:
        decided, is_end = self._object_end.push(self._held)
        self._show(parts, self._held[:decided])
        self._held = self._held[decided:]
        if is_end:
            self._end_arguments(parts)
            self._step = self._in_tail
        return is_end

    def _in_tail(self, _parts: list[Part]) -> bool:
        if self._has_end:
            self.is_over, left = read_tail(self._held, "}", self._end_text)
            if self._end_text is None and len(left) > MAX_NAME_CHARS:
                self.is_over = True
            self.rest = left if self.is_over else ""
        elif left := self._held.lstrip():
            self.is_over, self.rest = True, left.removeprefix("}")
        return False

    def _show(self, parts: list[Part], text: str) -> None:
        if shown := self._guard.push(text):
            parts.append(CallArguments(shown))

    def _end_arguments(self, parts: list[Part]) -> None:
        if shown := self._guard.close():
            parts.append(CallArguments(shown))
        parts.append(CallEnd())

    def _read_whole(self) -> list[Part]:
        call = _parse(self._held)
        if call is None or (self._names is not None and call[0] not in self._names):
            self.is_text = True
            return []
        self.is_begun = self.is_over = True
        return [CallBegin(call[0]), CallArguments(call[1]), CallEnd()]


def _parse(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is whole."""
    try:
        call: Any = parse_json(text)
        if not isinstance(call, dict) or not is_name(call.get("name")) or not call.keys() <= _CALL_KEYS:
            return None
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = parse_json(arguments)
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            return None
        guard = ArgumentsGuard()  # of what Python reads other parsers refuse half characters
        return call["name"], guard.push(json.dumps(arguments, allow_nan=False)) + guard.close()
    except (ValueError, RecursionError):
        return None


def parse_json(text: str) -> Any:
    """Strict JSON. Raises ValueError, also for NaN, and RecursionError."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)
