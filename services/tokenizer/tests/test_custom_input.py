"""The text of a custom tool's call, out of pieces of JSON."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_tokenizer.codec.events.custom_input import CustomInput


def pushed(pieces: list[str]) -> str:
    custom = CustomInput()
    return "".join(custom.push(piece) for piece in pieces)


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted({0, *(place % (len(text) + 1) for place in at), len(text)})
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


@given(
    text=st.text(),
    before=st.dictionaries(st.text(max_size=4), st.text(max_size=4) | st.integers(), max_size=2),
    is_ascii=st.booleans(),
    at=st.lists(st.integers(min_value=0)),
)
def test_any_text_in_any_pieces(text: str, before: dict[str, Any], is_ascii: bool, at: list[int]) -> None:
    before.pop("input", None)
    written = json.dumps({**before, "input": text, "after": [text]}, ensure_ascii=is_ascii)
    assert pushed(cut(written, at)) == text


def test_text_comes_as_soon_as_it_is_clear() -> None:
    custom = CustomInput()
    said = [custom.push(piece) for piece in ('{"inp', 'ut": "a', "\\", 'n"', '"}')]
    assert said == ["", "a", "", "\n", ""]


@pytest.mark.parametrize("value", [{"a": '}"]'}, [1, [2]], 3.5, None, True])
def test_a_value_of_another_kind_is_shown_as_json(value: Any) -> None:
    text = json.dumps({"input": value, "x": 1})
    assert pushed(list(text)) == json.dumps(value)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"input": "\\ud83dx"}', "\ufffdx"),
        ('{"input": "\\ude00x"}', "\ufffdx"),
        ('{"input": "\\uzz"}', "\\uzz"),
        ('{"input": "cut', "cut"),
        ('{"other": "x"}', ""),
        ('{"other": {"input": "x"}}', ""),
        ("", ""),
    ],
)
def test_what_is_odd(written: str, text: str) -> None:
    assert pushed(list(written)) == text == pushed([written])
