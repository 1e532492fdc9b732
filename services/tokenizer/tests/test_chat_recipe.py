"""Chat Completions bodies that deepseek-recipe takes become the same conversation as there."""

import json
from typing import Any

import deepseek_recipe
import pytest

from shoal_tokenizer.codec.api import RequestNames, Sampling
from shoal_tokenizer.codec.conversation import Conversation, ToolMode
from shoal_tokenizer.codec.requests.chat_completions import ChatCompletionsConverter
from shoal_tokenizer.codec.requests.served_model import ServedModel

from .recipe_messages import shown, shown_there

CONVERTER = ChatCompletionsConverter(ServedModel("tiny", Sampling(), 100))
OPTIONS = deepseek_recipe.ConversionOptions().with_model_alias("tiny", deepseek_recipe.ModelVersion.DeepseekV41Flash)
USER = {"role": "user", "content": "Hi, JSON please"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Does.", "parameters": SCHEMA}}]
OFF = {"thinking": {"type": "disabled"}}


def answer(content: Any = None, *calls: str, **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **fields}
    if calls:
        function = {"name": "f", "arguments": '{"a": 1}'}
        message["tool_calls"] = [{"id": call, "type": "function", "function": function} for call in calls]
    return message


def gave(call: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": content}


BODIES: dict[str, dict[str, Any]] = {
    "text": {"messages": [USER]},
    "parts": {"messages": [{"role": "system", "content": PARTS}, {"role": "user", "content": PARTS}]},
    "history": {"messages": [USER, answer("a"), USER, answer(PARTS), USER]},
    "reasoning": {"messages": [USER, answer("a", reasoning_content="r"), USER], "tools": TOOLS},
    "loop": {
        "messages": [USER, answer("a", "1", reasoning_content="r"), gave("1", "one"), answer(None, "2"), gave("2", "")],
        "tools": TOOLS,
    },
    "parallel": {"messages": [USER, answer("", "1", "2"), gave("2", "two"), gave("1", PARTS), USER], "tools": TOOLS},
    "prefix": {"messages": [USER, answer("Once", prefix=True)], **OFF},
    "reasoned prefix": {"messages": [USER, answer("Once", prefix=True, reasoning_content="r")]},
    "last answer": {"messages": [USER, answer("Once")], **OFF},
    "off": {"messages": [USER], **OFF},
    "adaptive": {"messages": [USER], "thinking": {"type": "adaptive"}},
    "none": {"messages": [USER], "reasoning_effort": "none"},
    "low": {"messages": [USER], "reasoning_effort": "low"},
    "disabled wins": {"messages": [USER], "reasoning_effort": "high", **OFF},
    "enabled wins": {"messages": [USER], "reasoning_effort": "none", "thinking": {"type": "enabled"}},
    "tools": {"messages": [USER], "tools": TOOLS, "tool_choice": "auto"},
    "object": {"messages": [USER], "response_format": {"type": "json_object"}},
    "schema": {
        "messages": [USER],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    },
    "regex": {"messages": [USER], "response_format": {"type": "regex", "regex": "a+"}},
    "required": {"messages": [USER], "tools": TOOLS, "tool_choice": "required", **OFF},
    "stop": {"messages": [USER], "stop": [str(number) for number in range(16)], "seed": 5, "max_tokens": 9},
}


def in_call_order(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """recipe keeps results as they came and sorts them while it renders."""
    order = {call_id: n for n, (call_id, *_rest) in enumerate(c for m in messages for c in m["calls"])}
    results = iter(sorted((m for m in messages if m["role"] == "tool"), key=lambda m: order[m["answers"]]))
    return [next(results) if message["role"] == "tool" else message for message in messages]


@pytest.mark.parametrize("name", BODIES)
def test_the_conversation_is_recipes(name: str) -> None:
    body = json.dumps({"model": "tiny", **BODIES[name]}).encode()
    request = deepseek_recipe.ChatCompletionRequest(body).convert(OPTIONS)
    theirs = request.conversation
    converted = CONVERTER.convert(body, RequestNames("r1", 0))
    ours = converted.prompt
    assert isinstance(ours, Conversation)
    expected = in_call_order([shown_there(message) for message in theirs.messages])
    assert [shown(message) for message in ours.messages] == expected
    assert ours.is_continued == bool(theirs.messages[-1].prefix)
    tools = [tool["function"] for tool in ours.tools or ()]
    assert [(tool["name"], tool["description"], tool["parameters"]) for tool in tools] == [
        (tool.name, tool.description, tool.parameters) for tool in theirs.tools or ()
    ]
    assert (ours.tool_choice.mode is ToolMode.REQUIRED) == (name == "required")
    assert (ours.thinking.is_on is not False) == theirs.thinking_mode
    assert (ours.answer_format is not None) == (name in ("object", "schema", "regex"))
    if ours.answer_format is not None:
        assert (ours.answer_format.schema, ours.answer_format.regex) == (theirs.response_schema, theirs.response_regex)
