"""Messages, the request: what the conversation becomes, what is refused, and that nothing else leaves the converter."""

import json
from typing import Any

import deepseek_recipe
import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1 import common_pb2 as pb
from shoal_tokenizer.codec.api import Converted, RequestNames, Sampling
from shoal_tokenizer.codec.conversation import Conversation, Effort, Thinking, ToolMode
from shoal_tokenizer.codec.events.carried_reasoning import carry
from shoal_tokenizer.codec.requests.fields import Verdict
from shoal_tokenizer.codec.requests.messages import FIELDS, MessagesConverter, Request
from shoal_tokenizer.codec.requests.served_model import ServedModel

CONVERTER = MessagesConverter(ServedModel("tiny", Sampling(stop_token_ids=[1]), 100))
NAMES = RequestNames("r1", 1_700_000_000)
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
USER = {"role": "user", "content": "Hi."}
OPTIONS = deepseek_recipe.ConversionOptions().with_model_alias("tiny", deepseek_recipe.ModelVersion.DeepseekV41Flash)


def convert(names: RequestNames = NAMES, **changes: Any) -> Converted:
    body = {"model": "tiny", "max_tokens": 9, "messages": [USER], **changes}
    return CONVERTER.convert(json.dumps({k: v for k, v in body.items() if v is not ...}).encode(), names)


def conversation(**changes: Any) -> Conversation:
    prompt = convert(**changes).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def refusal(**changes: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        convert(**changes)
    return caught.value


def use(call_id: str = "c1", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "look", "input": arguments}


def result(call_id: str = "c1", content: Any = "sunny", **others: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **others}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_a_whole_turn_with_thought_calls_and_results_out_of_order() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    messages = [
        USER,
        {"role": "assistant", "content": [thought, text("Look."), use("a", city="Paris"), use("b")]},
        {"role": "user", "content": [result("b", [text("x"), text("y")]), result("a"), text("And now?")]},
    ]
    system, user, answer, first, second, last = conversation(system="Be kind.", messages=messages).messages
    assert system == {"role": "system", "content": "Be kind."} and user == USER
    assert (answer["content"], answer["reasoning_content"]) == ("Look.", "hm")
    assert [call["function"] for call in answer["tool_calls"]] == [
        {"name": "look", "arguments": {"city": "Paris"}},
        {"name": "look", "arguments": {}},
    ]
    assert [first["tool_call_id"], second["tool_call_id"]] == ["a", "b"]
    assert (first["content"], second["content"]) == ("sunny", "x\n\ny")
    assert last == {"role": "user", "content": "And now?"}


def test_turns_of_one_role_are_one() -> None:
    messages = [USER, {"role": "user", "content": "Ho."}, {"role": "assistant", "content": "a"}, USER]
    assert [m["content"] for m in conversation(messages=messages).messages] == ["Hi.\n\nHo.", "a", "Hi."]


@pytest.mark.parametrize(("content", "told"), [("not there", "Error: not there"), ("An error: x", "An error: x")])
def test_an_error_is_told_in_words(content: str, told: str) -> None:
    messages = [USER, {"role": "assistant", "content": [use()]}]
    messages.append({"role": "user", "content": [result(content=content, is_error=True)]})
    assert conversation(messages=messages).messages[-1]["content"] == told


def test_a_thought_that_was_left_out_comes_back_from_its_signature() -> None:
    blocks = [{"type": "thinking", "thinking": "", "signature": carry("deep")}, text("a")]
    messages = [USER, {"role": "assistant", "content": blocks}, USER]
    assert conversation(messages=messages).messages[1]["reasoning_content"] == "deep"
    blocks[0]["signature"] = "of another server"
    assert conversation(messages=messages).messages[1]["reasoning_content"] == ""


@pytest.mark.parametrize("value", ["c5f", "0a1"])
def test_the_billing_line_does_not_reach_the_prompt(value: str) -> None:
    billing = f"x-anthropic-billing-header: cc_version=2.1.{value}; cc_entrypoint=cli;"
    for system in ([text(billing), text("Be kind.")], f"{billing}\nBe kind."):
        converted = convert(system=system)
        assert isinstance(converted.prompt, Conversation)
        assert converted.prompt.messages[0] == {"role": "system", "content": "Be kind."}
        assert "billing" in converted.notes[0]
    kept = MessagesConverter(ServedModel("tiny", Sampling(), 100), drops_billing_line=False)
    body = {"model": "tiny", "max_tokens": 1, "messages": [USER], "system": billing}
    prompt = kept.convert(json.dumps(body).encode(), NAMES).prompt
    assert isinstance(prompt, Conversation) and prompt.messages[0]["content"] == billing


def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    messages = [USER, {"role": "assistant", "content": "Once upon"}]
    continued = conversation(messages=messages)
    assert continued.is_continued and continued.thinking == Thinking(False)
    spaced = [USER, {"role": "assistant", "content": "Once "}]
    assert refusal(messages=spaced).param == "messages[1]"
    assert refusal(messages=messages, thinking={"type": "enabled", "budget_tokens": 2000}).param == "thinking"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Thinking()),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, Thinking(True)),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, Thinking(None, Effort.MAX)),
        ({"thinking": {"type": "between_tools"}}, Thinking(True)),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, Thinking(False)),
    ],
)
def test_thinking_and_effort(fields: dict[str, Any], expected: Thinking) -> None:
    assert conversation(**fields).thinking == expected


@pytest.mark.parametrize(
    ("choice", "mode", "names", "is_single"),
    [
        ({"type": "auto"}, ToolMode.AUTO, None, False),
        ({"type": "any"}, ToolMode.REQUIRED, None, False),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolMode.REQUIRED, None, True),
        ({"type": "tool", "name": "look"}, ToolMode.REQUIRED, ("look",), False),
        ({"type": "none"}, ToolMode.NONE, None, False),
    ],
)
def test_tool_choices(choice: dict[str, Any], mode: ToolMode, names: tuple[str, ...] | None, is_single: bool) -> None:
    chosen = conversation(tools=[TOOL], tool_choice=choice).tool_choice
    assert (chosen.mode, chosen.names, chosen.is_single) == (mode, names, is_single)
    assert convert(tools=[TOOL], tool_choice=choice).shape.has_tools == (mode is not ToolMode.NONE)


def test_a_schema_for_the_answer() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        wanted = conversation(**fields).answer_format
        assert wanted is not None and wanted.schema == {"type": "object"}
    other = {"type": "json_schema", "schema": {"type": "array"}}
    assert refusal(output_config={"format": form}, output_format=other).param == "output_format"


def test_sampling_shape_and_key() -> None:
    converted = convert(
        temperature=0.5, top_k=0, stop_sequences=["x"], stream=True, metadata={"user_id": "u"}, tools=[TOOL]
    )
    assert converted.sampling == Sampling(max_tokens=9, temperature=0.5, top_k=100, stop_token_ids=[1])
    assert (converted.shape.stop_strings, converted.shape.is_stream) == (("x",), True)
    assert (converted.shape.response_id, converted.cache_key, converted.is_agent) == ("msg_r1", "u", True)
    hidden = convert(thinking={"type": "adaptive", "display": "omitted"})
    assert not hidden.shape.is_reasoning_shown


def test_max_tokens_may_be_missing_where_tokens_are_counted() -> None:
    assert refusal(max_tokens=...).param == "max_tokens"
    counted = convert(RequestNames("r", 0, is_count=True), max_tokens=...)
    assert counted.sampling.max_tokens is None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": "other"}, "model"),
        ({"zap": 1}, "zap"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [result()]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [text("x"), result()]}]}, "messages[0].content[1]"),
        ({"messages": [{"role": "user", "content": [use()]}]}, "messages[0].content[0].type"),
        ({"messages": [USER, {"role": "assistant", "content": [use()]}, USER]}, "messages[2]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "zap"}]}]}, "messages[0].content[0].type"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "zap": 1}]}, "tools[0].zap"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"compaction": {}}, "compaction"),
    ],
)
def test_what_is_refused_is_named(changes: dict[str, Any], param: str) -> None:
    assert refusal(**changes).param == param


def test_no_servers_ask_for_nothing() -> None:
    assert convert(mcp_servers=[]).prompt == convert().prompt


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if "." not in name and "[" not in name])
def test_ignored_fields_change_neither_prompt_nor_sampling(name: str) -> None:
    if FIELDS[name].verdict is Verdict.IGNORED:
        plain, with_it = convert(), convert(**{name: {"x": 1}})
        assert (with_it.prompt, with_it.sampling) == (plain.prompt, plain.sampling)
    if FIELDS[name].verdict is Verdict.REFUSED:
        assert refusal(**{name: {"x": 1}}).code == pb.UNSUPPORTED


def test_every_field_of_the_api_has_a_verdict() -> None:
    ours = set(Request.__struct_fields__)
    sdk: set[str] = set()
    for module in (message_create_params, beta_message_create_params):
        sdk |= set(module.MessageCreateParamsStreaming.__annotations__)
        sdk |= set(module.MessageCreateParamsBase.__annotations__)
    top = {name for name in FIELDS if "." not in name and "[" not in name}
    assert ours == top
    assert sdk <= top


BODIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "blocks": {"system": [text("a"), text("b")], "messages": [{"role": "user", "content": [text("only")]}]},
    "turns": {"messages": [USER, {"role": "assistant", "content": [text("a"), text("b")]}, USER]},
    "loop": {
        "tools": [TOOL],
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, use(n=1)]},
            {"role": "user", "content": [result(content=[text("r"), text("s")]), text("go")]},
        ],
    },
    "system between": {"messages": [USER, {"role": "system", "content": "s"}, {"role": "user", "content": "c"}]},
    "off": {"thinking": {"type": "disabled"}},
    "effort": {"output_config": {"effort": "max"}},
}


@pytest.mark.parametrize("name", BODIES)
def test_the_conversation_is_recipes(name: str) -> None:
    body = json.dumps({"model": "tiny", "max_tokens": 9, "messages": [USER], **BODIES[name]}).encode()
    theirs = deepseek_recipe.MessagesRequest(body).convert(OPTIONS).conversation
    ours = CONVERTER.convert(body, NAMES).prompt
    assert isinstance(ours, Conversation)
    assert [(m["role"], m["content"], m.get("reasoning_content") or "") for m in ours.messages] == [
        (m.role, m.content, m.reasoning_content or "") for m in theirs.messages
    ]
    assert [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for m in ours.messages
        for call in m.get("tool_calls") or ()
    ] == [(c.id, c.name, json.loads(c.arguments)) for m in theirs.messages for c in m.tool_calls or ()]
    assert (ours.thinking.is_on is not False) == theirs.thinking_mode


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=9), x, max_size=3))
KINDS = ["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "zap"]
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional={
        "text": st.text(max_size=9),
        "id": st.text(max_size=3),
        "tool_use_id": st.text(max_size=3),
        "name": st.text(max_size=5),
        "input": JSON,
        "content": JSON,
        "thinking": st.text(max_size=5),
        "signature": st.text(max_size=5),
        "data": st.text(max_size=5),
    },
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "x"]), "content": JSON | st.lists(BLOCK, max_size=4)}
)


@settings(max_examples=400, deadline=None)
@given(
    messages=st.lists(MESSAGE, max_size=4),
    more=st.dictionaries(st.sampled_from(sorted({*Request.__struct_fields__} - {"messages"})), JSON, max_size=3),
)
def test_any_body_is_converted_or_refused(messages: list[Any], more: dict[str, Any]) -> None:
    body = json.dumps({"model": "tiny", "max_tokens": 5, **more, "messages": messages}).encode("utf-8", "replace")
    try:
        assert isinstance(CONVERTER.convert(body, NAMES), Converted)
    except BadRequest as refused:
        assert refused.message


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":' * 10_000, b'{"model":"\\ud800"}', b'{"max_tokens":NaN}'],
)
def test_hostile_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        CONVERTER.convert(body, NAMES)
