from typing import Any

import pytest

from shoal_contracts.errors import BadRequest
from shoal_tokenizer.codec.requests.tool_turns import pair_results, read_arguments


def calls(*ids: str) -> dict[str, Any]:
    made = [{"id": i, "type": "function", "function": {"name": f"f_{i}", "arguments": {}}} for i in ids]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "content": f"of {call_id}", "tool_call_id": call_id}


USER = {"role": "user", "content": "x"}


def paired(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return pair_results(list(messages), lambda index: f"messages[{index}]")


def test_results_come_in_the_order_of_their_calls_and_know_whose_they_are() -> None:
    found = paired(USER, calls("a", "b"), result("b"), result("a"), USER)
    assert [(m["role"], m.get("tool_call_id"), m.get("name")) for m in found] == [
        ("user", None, None),
        ("assistant", None, None),
        ("tool", "a", "f_a"),
        ("tool", "b", "f_b"),
        ("user", None, None),
    ]


def test_an_id_may_be_used_again_in_another_turn() -> None:
    assert len(paired(calls("a"), result("a"), calls("a"), result("a"))) == 4


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([USER, result("a")], "messages[1]", "answers no open tool call"),
        ([calls("a"), result("a"), result("a")], "messages[2]", "answers no open tool call"),
        ([calls("a", "b"), result("a"), USER], "messages[2]", "'b' has no result"),
        ([calls("a")], "messages[0]", "'a' has no result"),
        ([calls("a"), calls("b"), result("b")], "messages[1]", "'a' has no result"),
        ([calls("a", "a")], "messages[0]", "Two tool calls"),
    ],
)
def test_what_does_not_match_is_refused_where_it_stands(messages: list[dict[str, Any]], param: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as refusal:
        paired(*messages)
    assert refusal.value.param == param


def test_arguments_are_a_json_object_or_are_made_one() -> None:
    assert read_arguments('{"a": [1]}') == ({"a": [1]}, False)
    assert read_arguments("") == read_arguments(" \n") == ({}, False)
    assert read_arguments('{"cmd":"l') == ({"cmd": "l"}, True)
    assert read_arguments("{") == ({}, True)
    for text in ("[1]", "null", '"x"', "NaN"):
        assert read_arguments(text) == ({"": text}, True)
    deep, is_mended = read_arguments("[" * 100_000)
    assert is_mended and list(deep) == [""]
    for text in ('{"a": "\\ud800"}', '{"a": 1e999}'):
        arguments, is_mended = read_arguments(text)
        assert is_mended and list(arguments) == ["a"]
