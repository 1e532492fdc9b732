"""Calls as Qwen3-Coder writes them: parameters in tags of their own, values without quotes.

    <tool_call>
    <function=look>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

What type a value has only the tool's schema tells: parameters that are text there are shown as they are generated;
any other is JSON where it parses as JSON, and text where it does not, so it is held until it is whole.
"""

import json
import re
from collections.abc import Callable, Sequence

import msgspec

from shoal_tokenizer.codec.api import AnswerShape, CallArguments, CallBegin, CallEnd, Part, Text
from shoal_tokenizer.codec.chat_template.calls import MAX_HELD_CHARS, MAX_NAME_CHARS, CallFormat, read_tail
from shoal_tokenizer.codec.chat_template.json_call import is_name
from shoal_tokenizer.codec.chat_template.markers import Markers
from shoal_tokenizer.codec.chat_template.probes import CALL_NAME, CALL_VALUE
from shoal_tokenizer.codec.text_parser import longest_end

_CALL = re.compile(
    rf"(?P<begin><[^<>\s/]+>)(?P<before_name>\s*<function=){CALL_NAME}(?P<after_name>>\s*)"
    rf"<parameter=city>\s*{CALL_VALUE}\s*</parameter>(?P<tail>\s*</function>\s*)(?P<end></[^<>\s]+>)"
)
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_PARAMETER_END, _FUNCTION_END = "</parameter>", "</function>"
_SPACE = re.compile(r"\s*")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def find_format(shown_call: str, markers: Markers) -> CallFormat | None:
    """The format in which the call of the probe was written; None: another one."""
    found = _CALL.search(shown_call)
    if found is None:
        return None
    return CallFormat(
        begin=markers.tag(found["begin"]),
        end=markers.tag(found["end"]),
        head=(found["before_name"], found["after_name"]),
        tail=found["tail"].lstrip(),  # the white space before it belongs to a parameter, and there may be none
        arguments="qwen_xml",
        new_reader=_new_reader,
    )


def _new_reader(shape: AnswerShape, end_text: str | None) -> "XmlCallReader":
    return XmlCallReader(shape.text_parameters, end_text)


class XmlCallReader:
    """``CallReader``. Builds the JSON object of the arguments piece by piece."""

    def __init__(self, text_parameters: dict[str, tuple[str, ...]], end_text: str | None) -> None:
        self.is_begun = self.is_text = self.is_over = False
        self.rest = ""
        self._text_parameters = text_parameters
        self._texts: Sequence[str] = ()
        self._end_text = end_text
        self._held = ""
        self._step: Callable[[list[Part]], bool] = self._in_head
        self._key = ""
        self._is_first = True
        self._is_value_text = False
        self._is_value_begun = False
        self._searched = 0  # of the held text: no end of the value begins before

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def end(self) -> list[Part]:
        if not self.is_begun:
            self.is_text = True
            return []
        parts: list[Part] = []
        if self._step != self._in_tail:
            held = self._held
            self._held = ""
            if self._step == self._in_value:
                self._end_value(parts, _without_endings(held))
            else:
                self._show_junk(parts, held)
            self._end_arguments(parts)
        junk = self._held.strip()
        self.is_over = True
        return [*parts, Text(junk)] if junk else parts

    def close(self) -> list[Part]:
        if self.is_begun and self._step != self._in_tail:
            return []
        return self.end()

    def _in_head(self, parts: list[Part]) -> bool:
        name = self._read_tag(_FUNCTION)
        if name is None:
            return False
        if not is_name(name):
            self.is_text = True
            return False
        self.is_begun = True
        self._texts = self._text_parameters.get(name, ())
        parts += (CallBegin(name), CallArguments("{"))
        self._step = self._in_call
        return True

    def _read_tag(self, opening: str) -> str | None:
        """The name in a tag at the beginning; "" where there is none, None while that is undecided."""
        left = self._held.lstrip()
        if not left.startswith(opening):
            return None if opening.startswith(left) else ""
        name, is_whole, rest = left[len(opening) :].partition(">")
        if not is_whole:
            return None if len(name) <= MAX_NAME_CHARS and "\n" not in name else ""
        self._held = rest
        return name.strip()

    def _in_call(self, parts: list[Part]) -> bool:
        """Between parameters."""
        left = self._held.lstrip()
        ends = [text for text in (_FUNCTION_END, self._end_text) if text]
        for text in ends:
            if left.startswith(text):
                self._held = left.removeprefix(_FUNCTION_END)
                self._end_arguments(parts)
                self._step = self._in_tail
                return True
        if any(text.startswith(left) for text in ends):
            return False
        key = self._read_tag(_PARAMETER)
        if key is None:
            return False
        if not key or len(key) > MAX_NAME_CHARS:
            return self._skip_junk(parts, left)
        self._key = key
        self._is_value_text = key in self._texts
        self._is_value_begun = False
        self._step = self._in_value
        return True

    def _skip_junk(self, parts: list[Part], left: str) -> bool:
        """Something between parameters: kept, under no name, so that the model sees its mistake."""
        place = left.find("<", 1)
        if place < 0 and len(left) <= MAX_HELD_CHARS:
            return False
        place = len(left) if place < 0 else place
        self._held = left[place:]
        self._show_junk(parts, left[:place])
        return True

    def _show_junk(self, parts: list[Part], junk: str) -> None:
        if junk := junk.strip():
            parts.append(CallArguments(self._begin_member("") + json.dumps(junk, ensure_ascii=False)))

    def _in_value(self, parts: list[Part]) -> bool:
        if not self._is_value_begun:
            if not self._held:
                return False
            self._is_value_begun = True
            self._searched = 0
            self._held = self._held.removeprefix("\n")
            if self._is_value_text:
                parts.append(CallArguments(self._begin_member(self._key) + '"'))
        stop, left = self._find_value_end()
        if left is not None:
            self._end_value(parts, self._held[:stop].removesuffix("\n"))
            self._held = left
            self._step = self._in_call
            return True
        if self._is_value_text:
            self._show_text(parts, stop)
        elif len(self._held) > MAX_HELD_CHARS:
            self._is_value_text = True
            parts.append(CallArguments(self._begin_member(self._key) + '"'))
            self._show_text(parts, stop)
        return False

    def _find_value_end(self) -> tuple[int, str | None]:
        """Where the value ends, and what follows its tag; while undecided, up to where it is the value's for sure.

        A value may speak of the tag itself: only one that another tag follows ends it.
        """
        held = self._held
        following = [text for text in (_PARAMETER, _FUNCTION_END, self._end_text) if text]
        while (place := held.find(_PARAMETER_END, self._searched)) >= 0:
            self._searched = place
            space = _SPACE.match(held, place + len(_PARAMETER_END))
            assert space is not None
            after = space.end()
            if any(held.startswith(text, after) for text in following):
                return place, held[after:]
            is_short = len(held) - place <= MAX_NAME_CHARS
            if is_short and any(text.startswith(held[after:]) for text in following):
                return place - (held[place - 1 : place] == "\n"), None
            self._searched = place + 1
        self._searched = max(self._searched, len(held) - len(_PARAMETER_END) + 1)
        keep = max(longest_end(held, "\n" + _PARAMETER_END), longest_end(held, _PARAMETER_END))
        return len(held) - keep, None

    def _show_text(self, parts: list[Part], stop: int) -> None:
        if stop > 0:
            parts.append(CallArguments(_escaped(self._held[:stop])))
            self._held = self._held[stop:]
            self._searched = max(0, self._searched - stop)

    def _end_value(self, parts: list[Part], value: str) -> None:
        if self._is_value_text and self._is_value_begun:
            parts.append(CallArguments(_escaped(value) + '"'))
        else:
            parts.append(CallArguments(self._begin_member(self._key) + _to_json(value)))

    def _begin_member(self, key: str) -> str:
        comma, self._is_first = "" if self._is_first else ", ", False
        return f"{comma}{json.dumps(key, ensure_ascii=False)}: "

    def _end_arguments(self, parts: list[Part]) -> None:
        parts += (CallArguments("}"), CallEnd())

    def _in_tail(self, _parts: list[Part]) -> bool:
        self.is_over, left = read_tail(self._held, "", self._end_text)
        if self._end_text is None and len(left) > MAX_NAME_CHARS:
            self.is_over = True
        self.rest = left if self.is_over else ""
        return False


_read_json = msgspec.json.Decoder().decode  # strict, as the readers of clients


def _without_endings(value: str) -> str:
    """A value that the closing token ended, without what belongs to the tags."""
    left = value.rstrip()
    for ending in (_FUNCTION_END, _PARAMETER_END):
        if left.endswith(ending):
            value = left.removesuffix(ending)
            left = value.rstrip()
    return value.removesuffix("\n")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _to_json(value: str) -> str:
    """A value whose type is open."""
    value = _PYTHON_WORDS.get(value.strip(), value)
    try:
        _read_json(value)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return json.dumps(value, ensure_ascii=False)
    return value.strip()
