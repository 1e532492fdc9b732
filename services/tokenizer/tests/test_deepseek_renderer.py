"""Prompts are recipe's own, whatever the conversation; nothing typed becomes a control token."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shoal_contracts.errors import BadRequest
from shoal_testkit.deepseek_tokenizer import CONTEXT_TOKENS
from shoal_tokenizer.codec.api import AnswerStart, Codec, Rendered
from shoal_tokenizer.codec.conversation import (
    AnswerFormat,
    Conversation,
    Effort,
    Thinking,
    ToolChoice,
    ToolMode,
)

PROPERTIES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
VERSIONS = {"v4": recipe.ModelVersion.DeepseekV4Pro, "v41": recipe.ModelVersion.DeepseekV41Flash}
GROUNDING = [f"<｜{slash}{name}｜>" for name in ("ref", "box", "point", "polygon") for slash in ("", "/")]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "enum": ["<think>", "b"]}, "n": {}}}


def a_tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def a_call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [a_tool("look", description="Looks up.", parameters=SCHEMA), a_tool("say-it")]
USER = {"role": "user", "content": "Hi"}


class Recipe:
    """The oracle: recipe's own conversion of requests and its own encoding."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = recipe.Tokenizer.from_file(str(folder / "tokenizer.json"))
        encoding = recipe.DeepseekV4Encoding() if folder.name == "v4" else recipe.DeepseekV41Encoding()
        self.encoding = encoding.with_tokenizer(self.tokenizer)
        self.options = recipe.ConversionOptions().with_model_alias("m", VERSIONS[folder.name])

    def convert(self, body: dict[str, Any], request: Any = recipe.ChatCompletionRequest) -> recipe.ConversationRequest:
        return request(json.dumps({"model": "m", **body})).convert(self.options)  # type: ignore[no-any-return]

    def ids(self, body: dict[str, Any], request: Any = recipe.ChatCompletionRequest) -> list[int]:
        return self.encoding.encode(self.convert(body, request).conversation)


@pytest.fixture(scope="session")
def oracle(deepseek_folder: Path) -> Recipe:
    return Recipe(deepseek_folder)


def ids_of(codec: Codec, conversation: Conversation) -> list[int]:
    return codec.encoder.encode(codec.renderer.render(conversation, 0).segments)


# What trips renderers and tokenizers: white space at the borders, other scripts, halves of markup, control tokens.
PIECES = [
    *["a", " word", "Hello,", "\n", "\n\n", " ", "\t", "12345", "你好", "😀", "é", "\u200d", "\x00", "</tool_result>"],
    *['" string="true">', "<｜Us", "er｜>", "｜DSML｜", "<｜User｜>", "</think>", "<think>", "<｜end▁of▁sentence｜>"],
    *["<｜System｜>", "<｜image｜>", "｜", "<", ">", "</｜DSML｜parameter>", "tool_calls>", "<｜latest_reminder｜>"],
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
VALUES = st.one_of(TEXTS, st.integers(-(10**9), 10**9), st.none(), st.booleans(), st.lists(TEXTS, max_size=2))
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=3)
TOOL_LISTS = st.one_of(
    st.none(), st.just(TOOLS), TEXTS.map(lambda text: [a_tool("f", description=text, parameters={})])
)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """What converters make, with ids and pairs in order."""
    messages: list[dict[str, Any]] = []
    for turn in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            messages.append({"role": "system", "content": draw(TEXTS)})
        messages.append({"role": "user", "content": draw(TEXTS)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(TEXTS)}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(TEXTS)
        calls = [a_call(f"{turn}-{n}", "look", **draw(ARGUMENTS)) for n in range(draw(st.integers(0, 2)))]
        if calls:
            answer["tool_calls"] = calls
        messages.append(answer)
        messages += [{"role": "tool", "content": draw(TEXTS), "tool_call_id": call["id"]} for call in calls]
    if draw(st.booleans()):
        messages.append({"role": "user", "content": draw(TEXTS)})
    return Conversation(
        messages,
        draw(TOOL_LISTS),
        thinking=Thinking(draw(st.sampled_from([None, True, False])), draw(st.sampled_from([None, *Effort]))),
    )


def body_of(conversation: Conversation) -> dict[str, Any]:
    """The same as a request in recipe's form of Chat Completions."""
    messages = [dict(message) for message in conversation.messages]
    for message in messages:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message.get("tool_calls") or ()
        ] or None
    body: dict[str, Any] = {"messages": messages}
    if conversation.tools is not None:
        body["tools"] = conversation.tools
    if conversation.thinking.is_on is not None:
        body["thinking"] = {"type": "enabled" if conversation.thinking.is_on else "disabled"}
    if conversation.thinking.effort is not None and conversation.thinking.is_on is not False:
        body["reasoning_effort"] = conversation.thinking.effort.value
    return body


@given(conversation=conversations())
@PROPERTIES
def test_the_ids_are_those_of_the_same_request_in_recipe(
    conversation: Conversation, deepseek: Codec, oracle: Recipe
) -> None:
    try:
        expected = oracle.ids(body_of(conversation))
    except recipe.ConversionError:
        assume(False)
    assert ids_of(deepseek, conversation) == expected


def test_requests_in_each_of_recipes_apis_give_our_ids(deepseek: Codec, oracle: Recipe) -> None:
    calls = [a_call("1", "look", city="Bern"), a_call("2", "look")]
    results = [{"role": "tool", "content": text, "tool_call_id": call} for text, call in (("Rain", "1"), ("Sun", "2"))]
    assistant = {"role": "assistant", "content": "Hm", "reasoning_content": "So", "tool_calls": calls}
    system = {"role": "system", "content": "Be kind."}
    conversation = Conversation([system, USER, assistant, *results], TOOLS[:1])
    expected = ids_of(deepseek, conversation)
    function = TOOLS[0]["function"]
    assert oracle.ids(body_of(conversation)) == expected
    responses = [
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "So"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hm", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"city": "Bern"}'},
        {"type": "function_call", "call_id": "2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "Rain"},
        {"type": "function_call_output", "call_id": "2", "output": "Sun"},
    ]
    body: dict[str, Any] = {"instructions": "Be kind.", "input": [USER, *responses]}
    body["tools"] = [{"type": "function", **function}]
    assert oracle.ids(body, recipe.ResponsesRequest) == expected
    blocks = [
        {"type": "thinking", "thinking": "So", "signature": "s"},
        {"type": "text", "text": "Hm"},
        {"type": "tool_use", "id": "1", "name": "look", "input": {"city": "Bern"}},
        {"type": "tool_use", "id": "2", "name": "look", "input": {}},
    ]
    found = [{"type": "tool_result", "tool_use_id": i, "content": text} for i, text in (("1", "Rain"), ("2", "Sun"))]
    turns = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": found}]
    tool = {"name": "look", "description": "Looks up.", "input_schema": SCHEMA}
    body = {"system": "Be kind.", "messages": turns, "tools": [tool], "max_tokens": 5}
    assert oracle.ids(body, recipe.MessagesRequest) == expected


@pytest.mark.parametrize(
    ("format_", "body"),
    [
        (AnswerFormat(), {"type": "json_object"}),
        (AnswerFormat(SCHEMA), {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}),
        (AnswerFormat(regex="a+"), {"type": "regex", "regex": "a+"}),
    ],
)
def test_formats_of_the_answer(deepseek: Codec, oracle: Recipe, format_: AnswerFormat, body: dict[str, Any]) -> None:
    user = {"role": "user", "content": "As json."}
    expected = oracle.ids({"messages": [user], "response_format": body})
    assert ids_of(deepseek, Conversation([user], answer_format=format_)) == expected


def test_a_required_call_without_thinking_begins_in_the_prompt(deepseek: Codec, oracle: Recipe) -> None:
    conversation = Conversation([USER], TOOLS, ToolChoice(ToolMode.REQUIRED), Thinking(False))
    expected = oracle.ids({**body_of(conversation), "tool_choice": "required"})
    assert ids_of(deepseek, conversation) == expected
    assert deepseek.renderer.render(conversation, 0).start is AnswerStart.CALLS
    named = Conversation([USER], TOOLS, ToolChoice(ToolMode.REQUIRED, ("look",)), Thinking(False))
    assert ids_of(deepseek, named) == expected


def test_a_choice_of_tools_does_not_break_the_prefix(deepseek: Codec) -> None:
    plain = ids_of(deepseek, Conversation([USER], TOOLS))
    for choice in (
        ToolChoice(ToolMode.NONE),
        ToolChoice(ToolMode.REQUIRED),
        ToolChoice(ToolMode.AUTO, ("look",)),
        ToolChoice(is_single=True),
    ):
        assert ids_of(deepseek, Conversation([USER], TOOLS, choice)) == plain
    strict = [a_tool("look", description="Looks up.", parameters=SCHEMA, strict=True), TOOLS[1]]
    assert ids_of(deepseek, Conversation([USER], strict)) == plain


@pytest.mark.parametrize(
    ("answer", "is_on", "start"),
    [
        ({"content": "A", "reasoning_content": "R"}, None, AnswerStart.TEXT),
        ({"content": "A"}, None, AnswerStart.TEXT),
        ({"content": "", "reasoning_content": "R"}, None, AnswerStart.REASONING),
        ({"content": "A"}, False, AnswerStart.TEXT),
    ],
)
def test_an_answer_goes_on_where_the_given_text_ends(
    deepseek: Codec, oracle: Recipe, answer: dict[str, str], is_on: bool | None, start: AnswerStart
) -> None:
    last = {"role": "assistant", **answer}
    conversation = Conversation([USER, last], thinking=Thinking(is_on), is_continued=True)
    body = body_of(conversation)
    body["messages"][-1]["prefix"] = True
    assert ids_of(deepseek, conversation) == oracle.ids(body)
    assert deepseek.renderer.render(conversation, 0).start is start


def test_no_format_is_enforced_on_a_text_that_was_begun(deepseek: Codec) -> None:
    def rendered(content: str, is_on: bool) -> Rendered:
        last = {"role": "assistant", "content": content, "reasoning_content": "R"}
        thinking = Thinking(is_on)
        asked = Conversation([USER, last], thinking=thinking, answer_format=AnswerFormat(SCHEMA), is_continued=True)
        return deepseek.renderer.render(asked, 0)

    for is_on in (True, False):
        assert rendered('{"city"', is_on).constraint is None and "not enforced" in rendered("{", is_on).notes[0]
        assert rendered("", is_on).constraint is not None and rendered("", is_on).notes == ()


def test_thinking_is_on_unless_it_is_turned_off(deepseek: Codec) -> None:
    for is_on, start in ((None, AnswerStart.REASONING), (True, AnswerStart.REASONING), (False, AnswerStart.TEXT)):
        assert deepseek.renderer.render(Conversation([USER], thinking=Thinking(is_on)), 0).start is start


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("top_p", [None, 0.5, 0.97, 1.0])
def test_sampling_is_what_recipe_serves_the_model_with(
    deepseek: Codec, oracle: Recipe, tools: Any, is_on: bool, top_p: float | None
) -> None:
    body = body_of(Conversation([USER], tools, thinking=Thinking(is_on)))
    options = oracle.convert({**body, "temperature": 0.3, **({} if top_p is None else {"top_p": top_p})})
    rendered = deepseek.renderer.render(Conversation([USER], tools, thinking=Thinking(is_on)), 0)
    ours = {"temperature": 0.3, "top_p": 1.0 if top_p is None else top_p} | dict(rendered.fixed)
    ours = {name: max(value, rendered.least.get(name, 0)) for name, value in ours.items()}
    inference = options.inference_options
    assert ours == pytest.approx({"temperature": inference.temperature, "top_p": inference.top_p})


@pytest.mark.parametrize(
    ("effort", "is_on", "note"),
    [
        (Effort.MINIMAL, None, "effort: 'minimal' is not known to this model, 'low' was taken"),
        (Effort.LOW, None, None),
        (Effort.MEDIUM, None, "effort: 'medium' is not known to this model, 'high' was taken"),
        (Effort.HIGH, None, None),
        (Effort.XHIGH, None, "effort: 'xhigh' is not known to this model, 'high' was taken"),
        (Effort.MAX, None, None),
        (Effort.MAX, False, "effort: thinking is off, so it has no effect"),
    ],
)
def test_what_becomes_of_an_effort_is_told(
    deepseek: Codec, effort: Effort, is_on: bool | None, note: str | None
) -> None:
    rendered = deepseek.renderer.render(Conversation([USER], thinking=Thinking(is_on, effort)), 0)
    assert rendered.notes == (() if note is None else (note,))
    taken = Effort(note.split("'")[3]) if note is not None and is_on is None else effort
    assert (
        rendered.segments == deepseek.renderer.render(Conversation([USER], thinking=Thinking(is_on, taken)), 0).segments
    )


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("conversation", "param"),
    [
        (Conversation([{"role": "user", "content": "\ud800"}]), "messages"),
        (Conversation([USER, {"role": "assistant", "content": "", "tool_calls": [a_call("1", "\udfff")]}]), "messages"),
        (Conversation([USER], [a_tool("f", parameters=nested(5000))]), "tools"),
        (Conversation([USER], [a_tool("f", parameters={"maximum": 2**90})]), "tools"),
        (Conversation([USER], answer_format=AnswerFormat(nested(100))), "response_format"),
    ],
)
def test_what_recipe_cannot_hold_is_the_callers_mistake(
    deepseek: Codec, conversation: Conversation, param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        deepseek.renderer.render(conversation, 0)
    assert caught.value.param == param


def everywhere(text: str) -> list[Conversation]:
    """Conversations with this text in every place that a caller writes."""
    schema = {"type": "object", "description": text, "properties": {text: {"enum": [text], "title": text}}}
    tools = [a_tool(text, description=text, parameters=schema)]
    messages = [
        {"role": "system", "content": text},
        {"role": "user", "content": text},
        {"role": "assistant", "content": text, "reasoning_content": text},
        {"role": "user", "content": text},
        {
            "role": "assistant",
            "content": text,
            "reasoning_content": text,
            "tool_calls": [a_call(text, text, **{text: text, "b": [text], "c": {text: text}})],
        },
        {"role": "tool", "content": text, "tool_call_id": text, "name": text},
    ]
    last = {"role": "assistant", "content": text, "reasoning_content": text}
    return [
        Conversation(messages, tools, answer_format=AnswerFormat(schema)),
        Conversation(messages, thinking=Thinking(False)),
        Conversation([*messages, last], tools, is_continued=True),
        Conversation([*messages, {**last, "content": ""}], is_continued=True),
    ]


def test_nothing_typed_becomes_a_control_token(deepseek: Codec, deepseek_folder: Path) -> None:
    added = json.loads((deepseek_folder / "tokenizer.json").read_text())["added_tokens"]
    control = {token["id"] for token in added}
    spellings = [token["content"] for token in added]
    assert len(spellings) == 1283 and set(GROUNDING) <= set(spellings)

    def controls(segments: list[tuple[str, bool]]) -> list[int]:
        return [token_id for token_id in deepseek.encoder.encode(segments) if token_id in control]

    def leaks(text: str) -> bool:
        return any(
            controls(deepseek.renderer.render(typed, 0).segments)
            != controls(deepseek.renderer.render(plain, 0).segments)
            for typed, plain in zip(everywhere(text), everywhere("x"), strict=True)
        )

    assert [text for text in ("".join(spellings), " ".join(spellings), "\n".join(spellings)) if leaks(text)] == []
    assert [text for text in [*spellings[-60:], *GROUNDING, "<｜Us", "｜DSML｜ calls>"] if leaks(text)] == []
    for text in spellings:
        assert controls(deepseek.renderer.render_raw(text)) == [0]


def test_a_raw_text_begins_with_the_tokenizers_first_token(deepseek: Codec) -> None:
    ids = deepseek.encoder.encode(deepseek.renderer.render_raw("Once upon"))
    assert ids[0] == 0 and ids[1:] == deepseek.encoder.encode([("Once upon", False)])


def test_what_no_context_holds_is_refused_before_it_is_encoded(deepseek: Codec) -> None:
    with pytest.raises(BadRequest, match=f"{CONTEXT_TOKENS} tokens"):
        deepseek.encoder.encode([("x " * 50_000, False)] * 2000)


def test_threads_encode_side_by_side(deepseek: Codec) -> None:
    conversations_ = [
        Conversation([{"role": "user", "content": f"{n} " + "word 你好 <think> " * 500}], TOOLS) for n in range(16)
    ]
    one_by_one = [ids_of(deepseek, conversation) for conversation in conversations_]
    encode: Callable[[Conversation], list[int]] = lambda conversation: ids_of(deepseek, conversation)  # noqa: E731
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encode, conversations_)) == one_by_one
