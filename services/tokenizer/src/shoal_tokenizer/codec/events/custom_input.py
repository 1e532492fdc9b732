"""The text of a custom tool's call, out of the JSON in which the model wrote it, while it is written.

Models see a custom tool as a function with one string, ``input``; its caller gets that string. Pieces may be cut
anywhere, also inside of an escape. A value that is no string is shown as its JSON.
"""

import enum
import re

_RUN = re.compile(r'[^"\\]+')
_KEY = re.compile(r'((?:[^"\\]|\\.)*)"', re.DOTALL)
_UNIT = re.compile(r"\\u[0-9a-fA-F]{4}")
_HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_UNIT_CHARS = 6  # of \uXXXX
_MAX_KEY_CHARS = 64
_SIMPLE = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_FIELD = "input"


class _At(enum.Enum):
    """Where in the object the next character stands."""

    BETWEEN = "between"  # members
    KEY = "key"
    VALUE = "value"  # before it
    TEXT = "text"  # inside of a string value
    OTHER = "other"  # inside of a value of another kind
    OTHER_TEXT = "other_text"  # inside of a string in there


class CustomInput:
    """Of one call."""

    __slots__ = ("_at", "_depth", "_held", "_is_field")

    def __init__(self) -> None:
        self._at = _At.BETWEEN
        self._held = ""
        self._is_field = False
        self._depth = 0

    def push(self, text: str) -> str:
        """What the piece adds to the text."""
        text, self._held = self._held + text, ""
        shown: list[str] = []
        position = 0
        while position < len(text):
            step = _STEPS[self._at](self, text, position)
            if step is None:
                self._held = text[position:]
                break
            position, piece = step
            if self._is_field:
                shown.append(piece)
        return "".join(shown)

    def _between(self, text: str, position: int) -> tuple[int, str]:
        quote = text.find('"', position)
        if quote < 0:
            return len(text), ""
        self._at, self._is_field = _At.KEY, False
        return quote + 1, ""

    def _key(self, text: str, position: int) -> tuple[int, str] | None:
        key = _KEY.match(text, position)
        if key is None:
            if len(text) - position <= _MAX_KEY_CHARS:
                return None
            return len(text) - 1 if text[-1] == "\\" else len(text), ""
        self._at = _At.VALUE
        self._is_field = key[1] == _FIELD
        return key.end(), ""

    def _value(self, text: str, position: int) -> tuple[int, str]:
        mark = text[position]
        if mark.isspace() or mark == ":":
            return position + 1, ""
        if mark == '"':
            self._at = _At.TEXT
            return position + 1, ""
        self._at, self._depth = _At.OTHER, 0
        return position, ""

    def _text(self, text: str, position: int) -> tuple[int, str] | None:
        if run := _RUN.match(text, position):
            return run.end(), run.group()
        if text[position] == '"':
            self._at = _At.BETWEEN
            return position + 1, ""
        return _escape(text, position)

    def _other(self, text: str, position: int) -> tuple[int, str]:
        mark = text[position]
        if mark in ",}]" and self._depth == 0:
            self._at = _At.BETWEEN
            return position + 1, ""
        if mark == '"':
            self._at = _At.OTHER_TEXT
        self._depth += (mark in "{[") - (mark in "}]")
        return position + 1, mark

    def _other_text(self, text: str, position: int) -> tuple[int, str] | None:
        if run := _RUN.match(text, position):
            return run.end(), run.group()
        if text[position] == '"':
            self._at = _At.OTHER
            return position + 1, '"'
        pair = text[position : position + 2]
        return (position + 2, pair) if len(pair) > 1 else None


def _escape(text: str, position: int) -> tuple[int, str] | None:
    """The character of the escape at ``position``; None while it is cut off."""
    mark = text[position + 1 : position + 2]
    if mark != "u":
        return (position + 2, _SIMPLE.get(mark, mark)) if mark else None
    unit = text[position : position + _UNIT_CHARS]
    if len(unit) < _UNIT_CHARS:
        return None
    if not _UNIT.fullmatch(unit):
        return position + 1, "\\"  # no escape at all
    after = position + _UNIT_CHARS
    if not _HIGH.fullmatch(unit):
        return after, _character(int(unit[2:], 16))
    pair = text[after : after + _UNIT_CHARS]
    if _LOW.fullmatch(pair):
        code = 0x10000 + ((int(unit[2:], 16) - 0xD800) << 10) + int(pair[2:], 16) - 0xDC00
        return after + _UNIT_CHARS, chr(code)
    if len(pair) < _UNIT_CHARS and "\\u".startswith(pair[:2]):
        return None
    return after, _character(0xFFFD)


def _character(code: int) -> str:
    """Half a pair alone is no character, and no encoding of the answer could hold it."""
    return "\ufffd" if 0xD800 <= code <= 0xDFFF else chr(code)


_STEPS = {
    _At.BETWEEN: CustomInput._between,
    _At.KEY: CustomInput._key,
    _At.VALUE: CustomInput._value,
    _At.TEXT: CustomInput._text,
    _At.OTHER: CustomInput._other,
    _At.OTHER_TEXT: CustomInput._other_text,
}
