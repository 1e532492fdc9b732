import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_tokenizer.codec.arguments import ArgumentsGuard

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(st.text(), JSON, max_size=4)
CUTS = st.lists(st.integers(0, 400), max_size=6)


def guard(text: str, cuts: list[int]) -> str:
    guard = ArgumentsGuard()
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return "".join(guard.push(text[a:b]) for a, b in pairwise(ends)) + guard.close()


@given(OBJECT, CUTS, st.booleans())
def test_valid_arguments_pass_unchanged_however_they_are_cut(
    value: dict[str, object], cuts: list[int], ascii: bool
) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    assert guard(text, cuts) == text


@given(OBJECT, CUTS, st.integers(0, 200), st.text(max_size=5), st.integers(0, 5))
def test_anything_becomes_an_object_the_same_however_it_is_cut(
    value: dict[str, object], cuts: list[int], at: int, put: str, removed: int
) -> None:
    text = json.dumps(value, ensure_ascii=False)
    text = text[:at] + put + text[at + removed :]
    assert isinstance(json.loads(guard(text, cuts)), dict)
    assert guard(text, cuts) == guard(text, [])


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("", {}),
        ("{", {}),
        ('{"a": 1', {"a": 1}),
        ('{"a": tr', {"a": "tr"}),
        ('{"n": three}', {"n": "three"}),
        ('{"n": 3 apples, "m": 1}', {"n": 3, "": 'apples, "m": 1'}),
        ('{"n": [1, two]}', {"n": [1, "two]"]}),
        ('{"a": "x\ny", "b": 007}', {"a": "x\ny", "b": "007"}),
        ('{"a": "C:\\path"}', {"a": "C:\\path"}),
        ('{"a": "open', {"a": "open"}),
        ('{"a": "half \\u00', {"a": "half \\u00"}),
        ('{"a', {"a": None}),
        ('{"a":', {"a": None}),
        ("[1]", {"": "[1]"}),
        ('{"a": 1} and more', {"a": 1}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
        ('{"a": "\\ud800", "b": 1}', {"a": "\ufffd", "b": 1}),
        ('{"a": "\\udc00\\ud83d\\n"}', {"a": "\ufffd\ufffd\n"}),
        ('{"a": "\\ud83d\\u0041"}', {"a": "\ufffdA"}),
        ('{"a": 1e999, "b": -1.5e300}', {"a": "1e999", "b": -1.5e300}),
        ('{"a": x, ' + " " * 2000 + "y }", {"a": "x, " + " " * 2000 + "y"}),
    ],
)
def test_mistakes_stay_visible(text: str, meant: object) -> None:
    assert json.loads(guard(text, [])) == meant


def test_text_comes_out_as_soon_as_it_is_sure() -> None:
    guard = ArgumentsGuard()
    assert [guard.push(piece) for piece in ('{"a"', ": 1", "2", ', "b": "x\\', 'n"', "}")] == [
        '{"a"',
        ": ",
        "",
        '12, "b": "x',
        '\\n"',
        "}",
    ]
    assert guard.close() == ""
