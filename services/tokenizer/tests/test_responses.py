"""Responses requests: which input is taken, and which conversation it becomes."""

import json
from typing import Any

import pytest
from openai.types.responses.response_item import ResponseItem
from pydantic import TypeAdapter

from shoal_contracts.v1.common_pb2 import UNSUPPORTED
from shoal_tokenizer.codec.api import NeedsHistory
from shoal_tokenizer.codec.conversation import (
    Conversation,
)
from shoal_tokenizer.codec.events.carried_reasoning import carried, carry
from shoal_tokenizer.codec.requests.fields import Verdict
from shoal_tokenizer.codec.requests.responses_fields import FIELDS

from .responses_asked import NAMESPACE, SEARCH, F, G, conversation, convert, convert_bytes, refusal

USER = {"role": "user", "content": "Hi"}


def call(call_id: str, name: str = "f", arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}


def output(call_id: str, text: Any = "out") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def test_a_text_is_what_the_user_says_and_instructions_come_first() -> None:
    messages = conversation(instructions="Be kind.", input="Hi").messages
    assert messages == [{"role": "system", "content": "Be kind."}, USER]


def test_every_role_and_form_of_content() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "system", "content": parts, "status": "completed"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "phase": "final_answer"},
        {"role": "assistant", "content": "Or yes."},
        USER,
    ]
    assert conversation(input=items).messages == [
        {"role": "system", "content": "d"},
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "No.\n\nOr yes."},
        USER,
    ]


def test_items_of_one_answer_are_one_message_and_outputs_follow_the_order_of_their_calls() -> None:
    items = [USER, thought("t"), said("a"), call("1"), call("2"), output("2", "two"), output("1", "one"), said("z")]
    _, answer, one, two, last = conversation(input=items).messages
    assert (answer["reasoning_content"], answer["content"]) == ("t", "a")
    assert [each["id"] for each in answer["tool_calls"]] == ["1", "2"]
    assert [(m["content"], m["tool_call_id"], m["name"]) for m in (one, two)] == [("one", "1", "f"), ("two", "2", "f")]
    assert last == {"role": "assistant", "content": "z"}


def test_calls_are_what_the_family_sees() -> None:
    items = [
        USER,
        call("1", "h", '{"a": [1]}', namespace="ns"),
        {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "raw"},
        output("1", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]),
        {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
    ]
    _, answer, one, _two = conversation(input=items).messages
    assert [each["function"] for each in answer["tool_calls"]] == [
        {"name": "ns::h", "arguments": {"a": [1]}},
        {"name": "g", "arguments": {"input": "raw"}},
    ]
    assert one["content"] == "a\n\nb"


def test_thinking_again_begins_a_new_message() -> None:
    _, first, second, _ = conversation(input=[USER, said("a"), thought("t"), said("b"), USER]).messages
    assert (first["content"], second["reasoning_content"], second["content"]) == ("a", "t", "b")


def test_reasoning_that_a_client_carried_is_read_again() -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": carry("Hm 😀\n")}
    assert conversation(input=[USER, item, said("a"), USER]).messages[1]["reasoning_content"] == "Hm 😀\n"


@pytest.mark.parametrize("foreign", ["gAAAAABo", "", "é", "AQ=", carry("x")[:-2] + "!!", "_w=="])
def test_reasoning_of_another_server_is_left_out_and_told(foreign: str) -> None:
    assert carried(foreign) is None
    converted = convert(input=[USER, {"type": "reasoning", "summary": [], "encrypted_content": foreign}, USER])
    assert isinstance(converted.prompt, Conversation) and converted.prompt.messages == [USER, USER]
    assert [note for note in converted.notes if "another server" in note] or not foreign


def test_a_call_that_was_cut_off_and_has_no_output_is_left_out_and_told() -> None:
    converted = convert(input=[USER, said("a"), call("1", arguments='{"a', status="incomplete"), USER])
    assert isinstance(converted.prompt, Conversation)
    assert converted.prompt.messages == [USER, {"role": "assistant", "content": "a"}, USER]
    assert [note for note in converted.notes if "cut off" in note]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([USER, output("1")], "input[1]"),
        ([USER, call("1"), USER], "input[2]"),
        ([USER, call("1"), call("1"), output("1")], "input[1]"),
        ([USER, call("1", caller={"type": "program", "caller_id": "p"}), output("1")], "input[1].caller"),
        ([USER, {"role": "robot", "content": "x"}], "input[1].role"),
        ([USER, {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[1].content[0]"),
        ([USER, {"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}], "input[1].content[0]"),
        ([USER, {"role": "user", "content": [{"type": "magic"}]}], "input[1].content[0].type"),
        ([USER, call("1"), output("1", [{"type": "input_image", "file_id": "x"}])], "input[2].output[0]"),
        ([USER, {"type": "message", "role": "user", "content": "x", "new": 1}], "input[1].new"),
        ([USER, {"type": "function_call", "call_id": "1", "name": "f"}], "input[1].arguments"),
        ([USER, {"type": "magic"}], "input[1].type"),
        ([USER, {"type": 7}], "input[1].type"),
        ([USER, {"id": "msg_1"}], "input[1]"),
        ([USER, 7], "input[1]"),
        ([], "input"),
        ([{"role": "system", "content": "x"}], "input"),
        (None, "input"),
        (7, "input"),
    ],
)
def test_what_is_wrong_is_named(items: Any, param: str) -> None:
    assert refusal(input=items).param == param


REFUSED_KINDS = [
    path.split(": ")[1]
    for path, e in FIELDS.items()
    if path.startswith("input[].type") and e.verdict is Verdict.REFUSED
]


@pytest.mark.parametrize("kind", REFUSED_KINDS)
def test_items_that_cannot_be_continued_are_refused_by_name(kind: str) -> None:
    error = refusal(input=[USER, {"type": kind, "id": "x", "call_id": "y"}])
    assert (error.code, error.param) == (UNSUPPORTED, "input[1]") and repr(kind) in error.message


def test_a_request_as_codex_sends_it() -> None:
    body: dict[str, Any] = {
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
            {"type": "reasoning", "summary": [], "encrypted_content": carry("Look first.")},
            call("call_1", "shell", '{"command":["ls"]}'),
            {"type": "function_call_output", "call_id": "call_1", "output": '{"output":"a.py"}'},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": carry("Patch.")},
            {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "*** Begin Patch"},
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Success."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
        ],
        "tools": [
            {**F, "name": "shell", "description": "Runs.", "strict": False},
            {**F, "name": "update_plan", "description": "Plans.", "strict": False},
            {
                **G,
                "name": "apply_patch",
                "description": "Patches.",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin"},
            },
            SEARCH,
            NAMESPACE,
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019a",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "i"},
    }
    converted = convert(**body)
    assert isinstance(converted.prompt, Conversation)
    assert [message["role"] for message in converted.prompt.messages] == [
        "system",
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "user",
    ]
    thoughts = [m["reasoning_content"] for m in converted.prompt.messages if m["role"] == "assistant"]
    assert thoughts == ["Look first.", "Patch."]
    assert (converted.cache_key, converted.storage, converted.is_agent) == ("019a", None, True)


def test_history_is_asked_for_and_then_comes_first() -> None:
    body = {"model": "tiny", "input": [output("1")], "previous_response_id": "resp_0", "instructions": "New."}
    assert convert_bytes(json.dumps(body).encode()) == NeedsHistory("resp_0")
    history = [USER, {**thought("t"), "id": "rs_1", "status": "completed"}, call("1", id="fc_1", status="completed")]
    converted = convert(history=history, **body)
    assert isinstance(converted.prompt, Conversation)
    assert [message["role"] for message in converted.prompt.messages] == ["system", "user", "assistant", "tool"]
    assert converted.storage is not None
    assert converted.storage.previous_response_id == "resp_0"
    assert [item["type"] for item in json.loads(converted.storage.input_items)] == ["function_call_output"]


def test_nothing_new_goes_on_with_history_alone() -> None:
    converted = convert(history=[USER], input=None, previous_response_id="resp_0")
    assert isinstance(converted.prompt, Conversation) and converted.prompt.messages == [USER]


def test_history_that_does_not_fit_is_the_previous_responses_fault() -> None:
    error = refusal(history=[USER, call("1")], previous_response_id="resp_0")
    assert error.param == "input" and "'1'" in error.message
    assert refusal(history=[{"type": "magic"}], previous_response_id="resp_0").param == "previous_response_id[0].type"


def test_what_is_stored() -> None:
    items = [USER, said("a"), call("1"), output("1"), {"id": "rs_9", **thought("t")}, said("b"), USER]
    stored = convert(input=items, background=True).storage
    assert stored is not None and stored.is_stored and stored.is_background
    listed = json.loads(stored.input_items)
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseItem)
    for item in listed:
        adapter.validate_python(item)
    assert len({item["id"] for item in listed}) == len(items) and listed[4]["id"] == "rs_9"
    assert listed[0]["content"] == [{"type": "input_text", "text": "Hi"}] and listed[0]["id"] == "msg_r1_in0"
    pending, lost = json.loads(stored.pending_body), json.loads(stored.lost_body)
    assert (pending["status"], lost["status"], lost["error"]["code"]) == ("queued", "failed", "server_error")
    assert pending["id"] == lost["id"] == "resp_r1"
    again = convert(history=[*listed], input="More", previous_response_id="resp_r1")
    assert isinstance(again.prompt, Conversation)
    assert again.prompt.messages == [*conversation(input=items).messages, {"role": "user", "content": "More"}]


def test_without_a_store_nothing_is_kept() -> None:
    converted = convert(store=False)
    assert converted.storage is None and not converted.shape.is_kept
    stored = convert().storage
    assert stored is not None and not stored.is_background
    assert json.loads(stored.pending_body)["status"] == "in_progress"
