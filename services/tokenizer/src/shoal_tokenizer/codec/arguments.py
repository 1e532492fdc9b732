"""The arguments of a tool call as the model writes them -> always the text of one JSON object.

Clients parse what they have collected when a call ends, and agents fail on what is no JSON. Valid text passes as it
comes, but for a number or word, which waits for its end. From the first thing that is no JSON on, the rest becomes one
string at the place where it stood: the agent shows the model its own mistake instead of losing the call. Of that rest
only white space and a brace at its end are withheld: they may be what closes the object.
"""

import enum
import json
import math
import re

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SECOND_BEGIN = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?")
_ESCAPE_BEGIN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]+")
_NUMBER_OR_WORD = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_MAX_DEPTH = 128  # deeper than that parsers of clients give up
_MAX_HELD_CHARS = 1024  # longer blanks, and longer numbers and words, are no end and no value
_BLANK = " \t\n\r"
_SURROGATE_CHARS = 6  # \\ud83d


class _Due(enum.Enum):
    """What JSON allows next."""

    OBJECT = "object"  # the whole
    VALUE = "value"
    FIRST_VALUE = "first_value"  # or the end of the list
    KEY = "key"
    FIRST_KEY = "first_key"  # or the end of the object
    COLON = "colon"
    COMMA = "comma"  # or the end of what is open
    NOTHING = "nothing"


_BEFORE_REST = {_Due.OBJECT: '{"": ', _Due.KEY: '"": ', _Due.FIRST_KEY: '"": ', _Due.COLON: ": "}


class ArgumentsGuard:
    """Of one call; used by one parser."""

    __slots__ = ("_due", "_held", "_in_string", "_is_key", "_is_rest_begun", "_stack", "is_mending")

    def __init__(self) -> None:
        self._due = _Due.OBJECT
        self._stack: list[str] = []
        self._held = ""  # not yet judged: a number, a word, half an escape
        self._in_string = False
        self._is_key = False
        self._is_rest_begun = False
        self.is_mending = False  # a mistake was found: what comes is the rest

    @property
    def is_complete(self) -> bool:
        """Whether what was shown is the whole object."""
        return self._due is _Due.NOTHING

    def push(self, text: str) -> str:
        """What of it can be shown now."""
        text, self._held = self._held + text, ""
        shown: list[str] = []
        at = 0
        while at < len(text) and not self.is_mending:
            step = self._in(text, at) if self._in_string else self._between(text, at)
            if step is None:
                break
            at, piece = step
            shown.append(piece)
        if at < len(text) and not self.is_mending and len(text) - at > _MAX_HELD_CHARS:
            self.is_mending = True
        if self.is_mending:
            shown.append(self._push_rest(text[at:]))
        else:
            self._held = text[at:]
        return "".join(shown)

    def close(self) -> str:
        """The call is complete: what is missing of a JSON object."""
        shown = self._close_rest() if self.is_mending else self._close_held()
        closers = "".join("}" if opened == "{" else "]" for opened in reversed(self._stack))
        self._stack = []
        return shown + closers

    def _push_rest(self, text: str) -> str:
        closing = len(text.rstrip(_BLANK).removesuffix("}").rstrip(_BLANK))
        end = closing if len(text) - closing <= _MAX_HELD_CHARS else len(text)
        self._held = text[end:]
        return self._show_rest(text[:end])

    def _show_rest(self, text: str) -> str:
        """More of the string that the rest becomes; what it must stand behind comes before its first piece."""
        if not text or self._due is _Due.NOTHING:
            return ""
        before = ""
        if not self._is_rest_begun:
            before = self._before_rest() + '"'
            self._is_rest_begun = True
        return before + json.dumps(text, ensure_ascii=False)[1:-1]

    def _before_rest(self) -> str:
        if self._due is _Due.OBJECT:
            self._stack.append("{")
        if self._due is _Due.COMMA:
            return ', "": ' if self._stack[-1] == "{" else ", "
        return _BEFORE_REST.get(self._due, "")

    def _in(self, text: str, at: int) -> tuple[int, str] | None:
        if run := _STRING_RUN.match(text, at):
            return run.end(), run.group()
        if text[at] == '"':
            self._in_string = False
            self._due = _Due.COLON if self._is_key else _Due.COMMA
            return at + 1, '"'
        if text[at] != "\\":
            return at + 1, json.dumps(text[at])[1:-1]  # a bare control character
        if escape := _ESCAPE.match(text, at):
            return self._escape(text, escape)
        begin = _ESCAPE_BEGIN.match(text, at)
        if begin and begin.end() == len(text):
            return None
        return at + 1, "\\\\"  # it meant the character itself

    @staticmethod
    def _escape(text: str, escape: re.Match[str]) -> tuple[int, str] | None:
        """Half a character is none: parsers refuse it, so it is shown as one that is missing."""
        if not _HALF.fullmatch(escape.group()):
            return escape.end(), escape.group()
        other = text[escape.end() : escape.end() + _SURROGATE_CHARS]
        if _PAIR.fullmatch(escape.group() + other):
            return escape.end() + _SURROGATE_CHARS, escape.group() + other
        if len(other) < _SURROGATE_CHARS and _SECOND_BEGIN.fullmatch(other) and escape.group()[3] in "89abAB":
            return None  # the other half may come
        return escape.end(), "\\ufffd"

    def _between(self, text: str, at: int) -> tuple[int, str] | None:
        if (space := _SPACE.match(text, at)) and space.end() > at:
            return space.end(), space.group()
        if scalar := _SCALAR.match(text, at):
            return self._scalar(text, scalar)
        if self._mark(text[at]):
            return at + 1, text[at]
        self.is_mending = True
        return None

    def _scalar(self, text: str, scalar: re.Match[str]) -> tuple[int, str] | None:
        if self._due not in (_Due.VALUE, _Due.FIRST_VALUE):
            self.is_mending = True
            return None
        if scalar.end() == len(text):
            return None  # it may go on
        if not _NUMBER_OR_WORD.fullmatch(scalar.group()):
            self.is_mending = True
            return None
        self._due = _Due.COMMA
        return scalar.end(), _shown_scalar(scalar.group())

    def _mark(self, mark: str) -> bool:
        """Go on after one of JSON's own characters; False where it may not stand."""
        due = self._due
        if mark == '"' and due in (_Due.VALUE, _Due.FIRST_VALUE, _Due.KEY, _Due.FIRST_KEY):
            self._in_string, self._is_key = True, due in (_Due.KEY, _Due.FIRST_KEY)
        elif mark in "{[" and self._opens(mark):
            self._stack.append(mark)
            self._due = _Due.FIRST_KEY if mark == "{" else _Due.FIRST_VALUE
        elif mark == ":" and due is _Due.COLON:
            self._due = _Due.VALUE
        elif mark == "," and due is _Due.COMMA:
            self._due = _Due.KEY if self._stack[-1] == "{" else _Due.VALUE
        elif mark in "}]" and self._closes(mark):
            self._stack.pop()
            self._due = _Due.COMMA if self._stack else _Due.NOTHING
        else:
            return False
        return True

    def _opens(self, mark: str) -> bool:
        if self._due is _Due.OBJECT:
            return mark == "{"
        return self._due in (_Due.VALUE, _Due.FIRST_VALUE) and len(self._stack) < _MAX_DEPTH

    def _closes(self, mark: str) -> bool:
        if not self._stack or (self._stack[-1] == "{") != (mark == "}"):
            return False
        return self._due in (_Due.COMMA, _Due.FIRST_KEY if mark == "}" else _Due.FIRST_VALUE)

    def _close_held(self) -> str:
        held, self._held = self._held, ""
        if self._in_string:
            shown = held.replace("\\", "\\\\") + '"'
            return shown + (": null" if self._is_key else "")
        if held:
            is_good = _NUMBER_OR_WORD.fullmatch(held) is not None
            return _shown_scalar(held) if is_good else json.dumps(held)
        if self._due is _Due.OBJECT:
            return "{}"
        return self._filling()

    def _filling(self) -> str:
        """What must still come before everything that is open can be closed."""
        return {_Due.VALUE: "null", _Due.COLON: ": null", _Due.KEY: '"": null'}.get(self._due, "")

    def _close_rest(self) -> str:
        held, self._held = self._held.rstrip(), ""
        # What a writer put around the value closes what is open anyway.
        shown = self._show_rest(held.removesuffix("}").rstrip() if self._stack[:1] == ["{"] else held)
        if self._is_rest_begun:
            return shown + '"'
        return '""' if self._due in (_Due.VALUE, _Due.FIRST_VALUE) else self._filling()


def _shown_scalar(text: str) -> str:
    """A number beyond every range is told as it was written: parsers refuse it, or make an infinity of it."""
    is_beyond = text[-1].isdigit() and not text.lstrip("-").isdigit() and math.isinf(float(text))
    return json.dumps(text) if is_beyond else text
