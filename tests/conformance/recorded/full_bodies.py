"""A body of each API with something in every place that a caller can write to, for what must hold in all of them."""

import json
from collections.abc import Iterator
from typing import Any

_CALL = json.dumps({"city": "Paris", "days": [{"from": "Monday"}], "deep": {"er": "text"}})
_SCHEMA = {
    "type": "object",
    "description": "Where",
    "properties": {"city": {"type": "string", "description": "Of a city", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "$defs": {"place": {"title": "Place", "const": "here", "examples": ["there"], "default": "anywhere"}},
}
_ANSWER = {"type": "object", "properties": {"answer": {"type": "string", "description": "In words"}}}

CHAT: dict[str, Any] = {
    "model": "deepseek-v4",
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "How is it there?"},
        {
            "role": "assistant",
            "content": "I ask.",
            "reasoning_content": "They want the weather.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": _CALL}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny."},
        {"role": "assistant", "content": "It is sunny.", "reasoning_content": "Easy."},
        {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "tomorrow?"}]},
    ],
    "tools": [{"type": "function", "function": {"name": "weather", "description": "Asks", "parameters": _SCHEMA}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _ANSWER}},
    "stop": ["END"],
    "user": "someone",
}
RESPONSES: dict[str, Any] = {
    "model": "deepseek-v4",
    "instructions": "Be kind.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "How is it there?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "They want the weather."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I ask."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": _CALL},
        {"type": "function_call_output", "call_id": "c1", "output": "Sunny."},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "Patched."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And tomorrow?"}]},
    ],
    "tools": [
        {"type": "function", "name": "weather", "description": "Asks", "parameters": _SCHEMA, "strict": False},
        {"type": "custom", "name": "patch", "description": "Patches"},
        {
            "type": "namespace",
            "name": "notes",
            "description": "Notes of the team",
            "tools": [{"type": "function", "name": "search", "description": "Looks", "parameters": _SCHEMA}],
        },
    ],
    "text": {"format": {"type": "json_schema", "name": "answer", "schema": _ANSWER}},
    "metadata": {"who": "someone"},
}
MESSAGES: dict[str, Any] = {
    "model": "deepseek-v4",
    "max_tokens": 100,
    "system": [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "How is it there?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "They want the weather.", "signature": "s"},
                {"type": "text", "text": "I ask."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": json.loads(_CALL)},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Sunny."}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "No idea.", "is_error": True},
                {"type": "text", "text": "And tomorrow?"},
            ],
        },
    ],
    "tools": [{"name": "weather", "description": "Asks", "input_schema": _SCHEMA}],
    "output_config": {"format": {"type": "json_schema", "schema": _ANSWER}},
    "stop_sequences": ["END"],
    "metadata": {"user_id": "someone"},
}
COMPLETIONS: dict[str, Any] = {"model": "deepseek-v4", "prompt": "Once upon a time", "stop": ["END"]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/completions": COMPLETIONS,
}


def with_each_text_replaced(value: Any, text: str, place: str = "") -> Iterator[tuple[str, Any]]:
    """Where, and the body with ``text`` behind the string or the key there; also inside of strings that are JSON."""
    if isinstance(value, str):
        yield place, value + text
        if value.startswith("{"):
            for inner, changed in with_each_text_replaced(json.loads(value), text, f"{place}~"):
                yield inner, json.dumps(changed)
    elif isinstance(value, dict):
        for key, content in value.items():
            yield f"{place}.{key}#", {(name + text if name == key else name): own for name, own in value.items()}
            for inner, changed in with_each_text_replaced(content, text, f"{place}.{key}"):
                yield inner, {**value, key: changed}
    elif isinstance(value, list):
        for index, content in enumerate(value):
            for inner, changed in with_each_text_replaced(content, text, f"{place}[{index}]"):
                yield inner, [*value[:index], changed, *value[index + 1 :]]
