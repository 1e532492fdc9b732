"""A turn that a client sends back is rendered to the ids that the model generated: the prefix survives."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal_testkit.deepseek_answers import DeepseekAnswers, segments
from shoal_tokenizer.codec.api import (
    AnswerShape,
    AnswerStart,
    CallArguments,
    CallBegin,
    Codec,
    Part,
    Reasoning,
    Text,
)
from shoal_tokenizer.codec.conversation import Conversation, Thinking, ToolChoice, ToolMode

Shapes = Callable[..., AnswerShape]
PROPERTIES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
END_OF_TURN = 1
SNIPPETS = ["Hi", " there", "\n\n", "\n", "你好", "😀"]
ARGUMENTS = st.dictionaries(
    st.text("abcxyz_-é", min_size=1, max_size=6),
    st.one_of(
        st.lists(st.sampled_from([*SNIPPETS, "x", " ", "</a>", "｜", "<"]), max_size=5).map("".join),
        st.integers(-(2**53), 2**53),
        st.booleans(),
        st.none(),
        st.lists(st.text("ab 你", max_size=3), max_size=3),
        st.sampled_from([0.5, -2.25, 100.0]),  # models write other numbers in more than one way
    ),
    max_size=4,
)
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Hi"}


@given(
    reasoning=st.sampled_from(["", "Hm.", "Hm\n\nso. ", "\nHm"]),
    content=st.sampled_from(["", "Hi 你好", "A  b.", "Well:\n- x"]),
    calls=st.lists(ARGUMENTS, max_size=3),
    is_on=st.booleans(),
    is_required=st.booleans(),
)
@PROPERTIES
def test_a_turn_that_comes_back_renders_to_what_was_generated(
    deepseek: Codec,
    a_shape: Shapes,
    reasoning: str,
    content: str,
    calls: list[dict[str, Any]],
    is_on: bool,
    is_required: bool,
) -> None:
    codec, answers = deepseek, DeepseekAnswers(deepseek.model == "v4")
    choice = ToolChoice(ToolMode.REQUIRED if is_required and calls else ToolMode.AUTO)
    content = "" if choice.mode is ToolMode.REQUIRED else content
    asked = Conversation([USER], [TOOL], choice, thinking=Thinking(is_on))
    rendered = codec.renderer.render(asked, 0)
    prompt = codec.encoder.encode(rendered.segments)
    invokes = [
        answers.invoke(
            "f",
            *(
                (key, "true", value)
                if isinstance(value, str)
                else (key, "false", json.dumps(value, ensure_ascii=False))
                for key, value in arguments.items()
            ),
        )
        for arguments in calls
    ]
    block = answers.block(*invokes) if calls else ""
    if rendered.start is AnswerStart.CALLS:
        block = block.split(">\n", 1)[1]
    generated = codec.encoder.encode(segments((f"{reasoning}</think>" if is_on else "") + content + block))
    parser = codec.new_parser(a_shape(has_tools=True, start=rendered.start))
    turn = as_message([*parser.push(generated, ()).parts, *parser.close().parts])
    results = [
        {"role": "tool", "content": "r", "tool_call_id": call["id"], "name": "f"} for call in turn.get("tool_calls", ())
    ]
    again = Conversation([USER, turn, *results, USER], [TOOL], thinking=Thinking(is_on))
    ids = codec.encoder.encode(codec.renderer.render(again, 0).segments)
    assert ids[: len(prompt) + len(generated) + 1] == [*prompt, *generated, END_OF_TURN]


def as_message(parts: Sequence[Part]) -> dict[str, Any]:
    """The message that a client sends back."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    for part in parts:
        if isinstance(part, Text):
            message["content"] += part.text
        elif isinstance(part, Reasoning):
            message["reasoning_content"] += part.text
        elif isinstance(part, CallBegin):
            function = {"name": part.name, "arguments": ""}
            calls = message.setdefault("tool_calls", [])
            calls.append({"id": str(len(calls)), "type": "function", "function": function})
        elif isinstance(part, CallArguments):
            message["tool_calls"][-1]["function"]["arguments"] += part.text
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return message
