"""Chat Completions requests: messages, tools, and which of them may be called."""

import json
from typing import Any

import pytest

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1 import common_pb2 as pb
from shoal_tokenizer.codec.api import Converted, RequestNames, Sampling
from shoal_tokenizer.codec.conversation import Conversation, ToolChoice, ToolMode
from shoal_tokenizer.codec.requests.chat_completions import ChatCompletionsConverter
from shoal_tokenizer.codec.requests.served_model import ServedModel

CONVERTER = ChatCompletionsConverter(ServedModel("tiny", Sampling(), 100))
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "seen"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CUSTOM = {"type": "custom", "custom": {"name": "patch", "description": "Patches."}}
INPUT_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def convert(**fields: Any) -> Converted:
    body = {"model": "tiny", "messages": [USER]} | fields
    return CONVERTER.convert(json.dumps(body).encode(), RequestNames("r1", 1700000000))


def conversation(**fields: Any) -> Conversation:
    prompt = convert(**fields).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        convert(**fields)
    return caught.value


def texts(*parts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part} for part in parts]


def assistant(content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def custom_with(**fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "patch", **fields}}


def named(name: str, kind: str = "function") -> dict[str, Any]:
    return {"type": kind, kind: {"name": name}}


def test_content_parts_are_joined_and_developer_is_system() -> None:
    parts = texts("a", "b")
    parts[0] |= {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
    messages = conversation(messages=[{"role": "developer", "content": parts}, USER]).messages
    assert messages == [{"role": "system", "content": "a\n\nb"}, USER]


def test_tool_history_reads_as_templates_expect_it() -> None:
    answer = assistant(tool_calls=[CALL], refusal=None, annotations=[], audio=None, function_call=None)
    converted = convert(messages=[USER, answer, RESULT], tools=[TOOL])
    assert converted.is_agent and converted.shape.has_tools
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    assert isinstance(converted.prompt, Conversation)
    assert converted.prompt.tools == [TOOL]
    assert converted.prompt.messages == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {**RESULT, "name": "look"},
    ]


def test_results_are_put_into_the_order_of_the_calls() -> None:
    calls = [CALL, {**CALL, "id": "c2"}]
    results = [{**RESULT, "tool_call_id": "c2"}, {**RESULT, "content": texts("one", "two")}]
    messages = conversation(messages=[USER, assistant("", tool_calls=calls), *results]).messages
    assert [(message["tool_call_id"], message["content"]) for message in messages[2:]] == [
        ("c1", "one\n\ntwo"),
        ("c2", "seen"),
    ]


def test_an_answer_can_be_sent_back_as_a_library_keeps_it() -> None:
    kept = {
        **CALL,
        "index": 0,
        "function": {**CALL["function"], "parsed_arguments": {"at": 1}},  # type: ignore[dict-item]
    }
    answer = assistant("x", tool_calls=[kept], parsed=None, reasoning_details=[{}], provider_specific_fields={"a": 1})
    plain = assistant("x", tool_calls=[CALL])
    assert conversation(messages=[USER, answer, RESULT]) == conversation(messages=[USER, plain, RESULT])


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (assistant("a", reasoning_content="r"), {"content": "a", "reasoning_content": "r"}),
        (assistant("a", reasoning="r"), {"content": "a", "reasoning_content": "r"}),
        (assistant("a", reasoning="x", reasoning_content="r"), {"content": "a", "reasoning_content": "r"}),
        (assistant("a", reasoning_content=""), {"content": "a"}),
        (assistant(reasoning_content="r"), {"content": "", "reasoning_content": "r"}),
        (assistant(texts("a", "b")), {"content": "a\n\nb"}),
        (assistant(""), {"content": ""}),
        (assistant(refusal="No."), {"content": "No."}),
        (assistant([{"type": "refusal", "refusal": "No."}]), {"content": "No."}),
    ],
)
def test_what_the_model_said_before(answer: dict[str, Any], shown: dict[str, Any]) -> None:
    assert conversation(messages=[USER, answer, USER]).messages[1] == {"role": "assistant", **shown}


def test_custom_calls_of_the_history_are_calls_with_one_string() -> None:
    called = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": 'a "b"'}}
    messages = conversation(messages=[USER, assistant(tool_calls=[called]), RESULT]).messages
    assert messages[1]["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": 'a "b"'}}


@pytest.mark.parametrize("how", [{"prefix": True}, {}])
def test_an_answer_that_was_begun_is_gone_on_with(how: dict[str, Any]) -> None:
    fields = {} if how else {"continue_final_message": True, "add_generation_prompt": False}
    assert conversation(messages=[USER, assistant("Once", **how)], **fields).is_continued
    assert not conversation(messages=[USER, assistant("Once")]).is_continued


def test_tools_and_their_choice() -> None:
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True, "description": "d"}}  # type: ignore[dict-item]
    assert conversation(tools=[strict]).tools == [strict]
    loose = {"type": "function", "function": {**TOOL["function"], "strict": False}}  # type: ignore[dict-item]
    assert conversation(tools=[loose]).tools == [TOOL]
    assert conversation(tools=[named("look")]).tools == [named("look")]
    assert conversation(tools=[]).tools is None


def test_a_custom_tool_is_a_function_with_one_string() -> None:
    converted = convert(tools=[CUSTOM, TOOL])
    function = {"name": "patch", "description": "Patches.", "parameters": INPUT_SCHEMA}
    assert isinstance(converted.prompt, Conversation)
    assert converted.prompt.tools == [{"type": "function", "function": function}, TOOL]
    assert converted.shape.custom_tools == ("patch",) and converted.notes == ()


def test_a_grammar_is_told_and_noted() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: WORD"}}
    converted = convert(tools=[custom_with(format=grammar)])
    assert isinstance(converted.prompt, Conversation) and converted.prompt.tools
    assert "start: WORD" in converted.prompt.tools[0]["function"]["description"]
    assert converted.notes[0].startswith("tools[0].custom.format")
    assert convert(tools=[custom_with(format={"type": "text"})]).notes == ()


ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [named("look"), named("patch", "custom"), named("look")]},
}


@pytest.mark.parametrize(
    ("choice", "taken"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice(ToolMode.NONE)),
        ("required", ToolChoice(ToolMode.REQUIRED)),
        (named("look"), ToolChoice(ToolMode.REQUIRED, ("look",))),
        (named("patch", "custom"), ToolChoice(ToolMode.REQUIRED, ("patch",))),
        (ALLOWED, ToolChoice(ToolMode.AUTO, ("look", "patch"))),
    ],
)
def test_choices_leave_all_tools_in_the_prompt(choice: Any, taken: ToolChoice) -> None:
    chosen = conversation(tools=[TOOL, CUSTOM], tool_choice=choice)
    assert chosen.tool_choice == taken
    assert chosen.tools == conversation(tools=[TOOL, CUSTOM]).tools


def test_calls_one_at_a_time_and_none_at_all() -> None:
    assert conversation(tools=[TOOL], parallel_tool_calls=False).tool_choice.is_single
    assert not conversation(parallel_tool_calls=False).tool_choice.is_single
    assert not convert(tools=[TOOL], tool_choice="none").shape.has_tools
    assert conversation(tool_choice="none").tools is None and conversation(tool_choice="auto").tools is None


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
LEGACY = {"name": "look", "arguments": "{}"}
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [*texts("a"), IMAGE]}]}, "messages[0].content[1].type"),
    ({"messages": [{**RESULT, "content": [{"type": "file", "file": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [assistant("x", audio={"id": "a"})]}, "messages[0].audio"),
    ({"messages": [assistant(function_call=LEGACY)]}, "messages[0].function_call"),
    ({"messages": [{"role": "function", "name": "look", "content": "x"}]}, "messages[0].role"),
]


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED, ids=[param for _, param in UNSUPPORTED])
def test_what_is_not_offered_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.code, error.param) == (pb.UNSUPPORTED, param)


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"messages": [USER, RESULT]}, "messages[1]"),
    ({"messages": [assistant(tool_calls=[CALL]), USER]}, "messages[1]"),
    ({"messages": [assistant(tool_calls=[CALL, CALL]), RESULT]}, "messages[0]"),
    ({"messages": [assistant(tool_calls=[{**CALL, "type": "zap"}])]}, "messages[0].tool_calls[0].type"),
    ({"messages": [assistant(tool_calls=[{"id": "c1"}])]}, "messages[0].tool_calls[0].function"),
    ({"messages": [assistant(tool_calls=[{"id": "c1", "type": "custom"}])]}, "messages[0].tool_calls[0].custom"),
    ({"messages": [assistant(tool_calls=[{**CALL, "id": ""}])]}, "messages[0].tool_calls[0].id"),
    ({"messages": [assistant("x", prefix=True), USER]}, "messages[0].prefix"),
    ({"messages": [USER, assistant("x", tool_calls=[CALL], prefix=True)]}, "messages[1].prefix"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [named("a b")]}, "tools[0].function.name"),
    ({"tools": [named("x" * 65)]}, "tools[0].function.name"),
    ({"tools": [named("é")]}, "tools[0].function.name"),
    ({"tools": [custom_with(name="")]}, "tools[0].custom.name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [CUSTOM, named("patch")]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "zap": 1}}]}, "tools[0].function.zap"),
    ({"tools": [TOOL], "tool_choice": named("other")}, "tool_choice.function.name"),
    ({"tools": [TOOL], "tool_choice": named("look", "custom")}, "tool_choice.custom.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "zap"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": ALLOWED}, "tool_choice.allowed_tools.tools[1].custom.name"),
]


@pytest.mark.parametrize(("fields", "param"), INVALID, ids=[f"{p}-{n}" for n, (_, p) in enumerate(INVALID)])
def test_what_the_caller_must_change_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.code, error.param) == (pb.INVALID_REQUEST, param), error.message
    assert "`" not in error.message and "$" not in error.message


def test_kinds_that_are_refused_are_not_called_supported() -> None:
    assert refused(messages=[{"role": "user", "content": [{"type": "smell"}]}]).message == (
        "Invalid value: 'smell'. Supported values are: 'text', 'refusal'."
    )
    assert "'function'" not in refused(messages=[{"role": "wizard"}]).message


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"$ref": "#/$defs/n"}}},
        {"type": "object", "properties": {"\ud7ff\x00": {"enum": [1e300, -(2**63), None]}}},
    ],
)
def test_odd_schemas_are_passed_on(schema: dict[str, Any]) -> None:
    tools = conversation(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]).tools
    assert tools is not None and tools[0]["function"]["parameters"] == schema
