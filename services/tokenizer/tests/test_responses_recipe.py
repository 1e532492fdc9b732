"""Bodies that deepseek-recipe takes become the same conversation as there."""

import json
from typing import Any

import deepseek_recipe
import pytest

from shoal_tokenizer.codec.api import Converted, RequestNames, Sampling
from shoal_tokenizer.codec.conversation import Conversation
from shoal_tokenizer.codec.requests.responses import ResponsesConverter
from shoal_tokenizer.codec.requests.served_model import ServedModel

from .recipe_messages import shown, shown_there

CONVERTER = ResponsesConverter(ServedModel("tiny", Sampling(), 100))
OPTIONS = deepseek_recipe.ConversionOptions().with_model_alias("tiny", deepseek_recipe.ModelVersion.DeepseekV41Flash)
USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "name": "f", "description": "Does.", "parameters": SCHEMA}]


def said(*texts: str) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "role": "assistant", "content": parts}


def thought(*texts: str) -> dict[str, Any]:
    parts = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": parts}


def called(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": arguments}


def gave(call_id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


PARTS = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
BODIES: dict[str, dict[str, Any]] = {
    "text": {"input": "Hi 😀\n"},
    "instructions": {"input": "Hi", "instructions": "Be kind."},
    "roles": {"input": [{"role": "system", "content": "s"}, {"role": "user", "content": PARTS}, said("a", "b"), USER]},
    "developer": {"input": [{"role": "developer", "content": "d"}, USER], "instructions": "Be kind."},
    "users": {"input": [USER, USER]},
    "answers": {"input": [USER, said("a"), said("b"), USER]},
    "easy": {"input": [USER, {"role": "assistant", "content": "a"}, USER]},
    "reasoning": {"input": [USER, thought("t"), said("a"), USER], "tools": TOOLS},
    "thoughts": {"input": [USER, thought("t", "u"), thought("v"), said("a"), USER], "tools": TOOLS},
    "again": {"input": [USER, said("a"), thought("t"), said("b"), USER], "tools": TOOLS},
    "loop": {
        "input": [USER, thought("t"), said("a"), called("1", '{"a": 1}'), gave("1", "one"), thought("u"), said("z")],
        "tools": TOOLS,
    },
    "parallel": {
        "input": [USER, called("1"), called("2"), gave("2", "two"), gave("1", PARTS), USER],
        "tools": TOOLS,
    },
    "sequence": {"input": [USER, called("1"), gave("1", "one"), called("2"), gave("2", "two")], "tools": TOOLS},
    "off": {"input": "Hi", "reasoning": {"effort": "none"}},
    "low": {"input": "Hi", "reasoning": {"effort": "low"}},
    "schema": {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
}


@pytest.mark.parametrize("name", BODIES)
def test_the_conversation_is_recipes(name: str) -> None:
    body = json.dumps({"model": "tiny", **BODIES[name]}).encode()
    theirs = deepseek_recipe.ResponsesRequest(body).convert(OPTIONS).conversation
    converted = CONVERTER.convert(body, RequestNames("r1", 0))
    assert isinstance(converted, Converted) and isinstance(converted.prompt, Conversation)
    ours = converted.prompt
    assert [shown(message) for message in ours.messages] == [shown_there(message) for message in theirs.messages]
    tools = [tool["function"] for tool in ours.tools or ()]
    assert [(tool["name"], tool["description"], tool["parameters"]) for tool in tools] == [
        (tool.name, tool.description, tool.parameters) for tool in theirs.tools or ()
    ]
    assert (ours.thinking.is_on is not False) == theirs.thinking_mode
    if ours.answer_format is not None:
        assert ours.answer_format.schema == theirs.response_schema
