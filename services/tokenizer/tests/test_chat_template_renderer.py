"""What the renderer makes of a conversation's wishes: thinking, tools, answers that go on; and of hostile ones."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1 import common_pb2 as pb
from shoal_testkit.chat_models import CHAT_MODELS
from shoal_tokenizer.codec.api import AnswerStart, Codec, Rendered
from shoal_tokenizer.codec.conversation import (
    FORMAT_NOTE,
    AnswerFormat,
    Conversation,
    Effort,
    Thinking,
    ToolChoice,
    ToolMode,
)
from shoal_tokenizer.model_files import load_codec

USER = {"role": "user", "content": "Hi"}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"properties": {"city": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "n", "parameters": {"properties": {"n": {"type": "integer"}}}}},
]


@pytest.fixture(scope="session")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Codec]:
    folder = tmp_path_factory.mktemp("chat_models")
    return {name: load_codec(model.write(folder / name), name, 16) for name, model in CHAT_MODELS.items()}


def prompt(rendered: Rendered) -> str:
    return "".join(text for text, _ in rendered.segments)


@pytest.mark.parametrize(
    ("name", "is_on", "end", "start", "note"),
    [
        ("qwen3", None, "assistant\n", AnswerStart.TEXT, None),
        ("qwen3", True, "assistant\n", AnswerStart.TEXT, None),
        ("qwen3", False, "<think>\n\n</think>\n\n", AnswerStart.TEXT, None),
        ("spelled", True, "<think>", AnswerStart.REASONING, None),
        ("spelled", False, "assistant\n", AnswerStart.TEXT, None),
        ("r1", None, "<think>\n", AnswerStart.REASONING, None),
        ("r1", False, "<think>\n", AnswerStart.REASONING, "cannot turn it off"),
        ("llama3", False, "\n\n", AnswerStart.TEXT, None),
        ("llama3", True, "\n\n", AnswerStart.TEXT, "has none"),
    ],
)
def test_thinking_is_what_the_template_makes_of_it(
    codecs: dict[str, Codec], name: str, is_on: bool | None, end: str, start: AnswerStart, note: str | None
) -> None:
    rendered = codecs[name].renderer.render(Conversation([USER], thinking=Thinking(is_on)), 0)
    assert prompt(rendered).endswith(end) and rendered.start is start
    assert [note in told for told in rendered.notes] == ([True] if note else []) if note else not rendered.notes


@pytest.mark.parametrize(
    ("effort", "shown", "is_told"),
    [(Effort.LOW, "low", False), (Effort.MINIMAL, "low", True), (Effort.MAX, "high", True)],
)
def test_an_unknown_effort_becomes_the_nearest_and_is_told(
    codecs: dict[str, Codec], effort: Effort, shown: str, is_told: bool
) -> None:
    rendered = codecs["spelled"].renderer.render(Conversation([USER], thinking=Thinking(effort=effort)), 0)
    assert f"Effort: {shown}" in prompt(rendered) and bool(rendered.notes) == is_told
    without = codecs["qwen3"].renderer.render(Conversation([USER], thinking=Thinking(effort=effort)), 0)
    assert "no effect" in without.notes[0]


def test_a_user_who_types_the_mark_does_not_open_reasoning(codecs: dict[str, Codec]) -> None:
    messages = [USER, {"role": "assistant", "content": "<think>"}]
    rendered = codecs["qwen3"].renderer.render(Conversation(messages, is_continued=True), 0)
    assert prompt(rendered).endswith("<think>") and rendered.start is AnswerStart.TEXT


def test_reasoning_of_the_history_is_shown_where_the_template_shows_it(codecs: dict[str, Codec]) -> None:
    turn = {"role": "assistant", "content": "Yes.", "reasoning_content": "Because."}
    later = codecs["qwen3"].renderer.render(Conversation([USER, turn, USER]), 0)
    assert "Because." not in prompt(later)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {}}}
    result = {"role": "tool", "content": "r", "tool_call_id": "c", "name": "look"}
    within = codecs["qwen3"].renderer.render(Conversation([USER, {**turn, "tool_calls": [call]}, result], TOOLS), 0)
    assert "<think>\nBecause.\n</think>\n\nYes.\n<tool_call>" in prompt(within)


@pytest.mark.parametrize("name", CHAT_MODELS)
@pytest.mark.parametrize("text", ["The answer ", "is:\n", "  x", ""])
def test_an_answer_goes_on_where_the_last_message_ends(codecs: dict[str, Codec], name: str, text: str) -> None:
    renderer = codecs[name].renderer
    turn = {"role": "assistant", "content": text}
    rendered = renderer.render(Conversation([USER, turn], is_continued=True), 0)
    opened = renderer.render(Conversation([USER]), 0)
    if not text:
        assert (rendered.segments, rendered.start) == (opened.segments, opened.start)
        return
    expected = text.strip() if name == "llama3" else text  # its template trims
    assert prompt(rendered).endswith(expected) and rendered.start is AnswerStart.TEXT
    if name != "qwen3":  # which shows that the turn has no reasoning
        assert prompt(rendered) == prompt(opened).removesuffix("<think>\n") + expected


def test_strict_does_not_change_the_prompt_and_no_choice_does(codecs: dict[str, Codec]) -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    renderer = codecs["qwen3"].renderer
    plain = renderer.render(Conversation([USER], TOOLS), 0)
    for conversation in (
        Conversation([USER], strict),
        Conversation([USER], TOOLS, ToolChoice(ToolMode.NONE)),
        Conversation([USER], TOOLS, ToolChoice(ToolMode.REQUIRED, ("n",), is_single=True)),
    ):
        assert renderer.render(conversation, 0).segments == plain.segments
    assert plain.constraint is None and '"strict"' not in prompt(plain)


def test_text_parameters_are_told_for_the_parser(codecs: dict[str, Codec]) -> None:
    rendered = codecs["qwen3_coder"].renderer.render(Conversation([USER], TOOLS), 0)
    assert rendered.text_parameters == {"look": ("city",), "n": ()}
    assert codecs["llama3"].renderer.render(Conversation([USER], TOOLS), 0).text_parameters == {
        "look": ("city",),
        "n": (),
    }
    assert codecs["qwen3"].renderer.render(Conversation([USER], TOOLS), 0).text_parameters == {}


UNKNOWN_CALLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ 'CALL ' + c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)


def test_calls_of_an_unknown_form_cannot_be_required(folder_with: Callable[..., Path]) -> None:
    codec = load_codec(folder_with(UNKNOWN_CALLS), "m", 0)
    with pytest.raises(BadRequest) as caught:
        codec.renderer.render(Conversation([USER], TOOLS, ToolChoice(ToolMode.REQUIRED)), 0)
    assert (caught.value.code, caught.value.param) == (pb.UNSUPPORTED, "tool_choice")
    rendered = codec.renderer.render(Conversation([USER], TOOLS, ToolChoice(is_single=True)), 0)
    assert rendered.constraint is None and "as text" in rendered.notes[0]


@pytest.mark.parametrize(
    ("conversation", "has_constraint"),
    [
        (Conversation([USER], TOOLS), False),
        (Conversation([USER], TOOLS, ToolChoice(names=("n",))), True),
        (Conversation([USER], TOOLS, ToolChoice(is_single=True)), True),
        (Conversation([USER], TOOLS, ToolChoice(ToolMode.REQUIRED)), True),
        (Conversation([USER], TOOLS, ToolChoice(ToolMode.NONE, ("n",), is_single=True)), False),
        (Conversation([USER], None, ToolChoice(is_single=True)), False),
        (Conversation([USER], answer_format=AnswerFormat()), True),
        (Conversation([USER], TOOLS, ToolChoice(ToolMode.NONE), answer_format=AnswerFormat(regex="a")), True),
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_coder", "llama3", "spelled"])
def test_there_is_a_constraint_only_where_one_is_wanted(
    codecs: dict[str, Codec], name: str, conversation: Conversation, has_constraint: bool
) -> None:
    constraint = codecs[name].renderer.render(conversation, 0).constraint
    assert (constraint is not None) == has_constraint
    if constraint is not None:
        assert json.loads(constraint)["type"] == "structural_tag"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("name", ["qwen3", "qwen3_coder", "llama3"])
def test_what_is_nested_too_deeply_is_refused_and_recursion_is_only_text(codecs: dict[str, Codec], name: str) -> None:
    def tool(parameters: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]

    renderer = codecs[name].renderer
    recursive = {"type": "object", "properties": {"next": {"$ref": "#"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert '"$ref": "#"' in prompt(renderer.render(Conversation([USER], tool(recursive)), 0)) or name == "qwen3_coder"
    with pytest.raises(BadRequest, match="nested"):
        renderer.render(Conversation([USER], tool({"properties": {"a": nested(10_000)}})), 0)
    arguments = {"a": nested(10_000)}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(BadRequest, match="nested"):
        renderer.render(Conversation([USER, {"role": "assistant", "content": "", "tool_calls": [call]}], tool({})), 0)


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_100_000_messages_take_seconds(codecs: dict[str, Codec], name: str) -> None:
    messages = [USER, {"role": "assistant", "content": "x"}] * 50_000
    begin_s = time.process_time()
    rendered = codecs[name].renderer.render(Conversation([*messages, USER]), 0)
    assert len(codecs[name].encoder.encode(rendered.segments)) > 100_000
    assert time.process_time() - begin_s < 20


def test_format_of_a_begun_answer_is_noted_and_not_enforced(codecs: dict[str, Codec]) -> None:
    renderer = codecs["qwen3"].renderer
    begun = [USER, {"role": "assistant", "content": '{"a": '}]
    rendered = renderer.render(Conversation(begun, answer_format=AnswerFormat(), is_continued=True), 0)
    assert rendered.constraint is None and FORMAT_NOTE in rendered.notes
    fresh = renderer.render(Conversation([USER], answer_format=AnswerFormat()), 0)
    assert fresh.constraint is not None and FORMAT_NOTE not in fresh.notes
