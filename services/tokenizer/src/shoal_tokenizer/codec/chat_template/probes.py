"""Conversations by which it is found out at load what a chat template can show. No word of them is a control token."""

from typing import Any

CALL_NAME = "probe_call"
CALL_VALUE = "Probeville"
REASONING = "Probe reasoning."
ANSWER = "Probe assistant."

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "probe"}}},
    },
}
SYSTEM: dict[str, Any] = {"role": "system", "content": "Probe system."}
USER: dict[str, Any] = {"role": "user", "content": "Probe user: 12 × 30 = 360?\n\nüñí 你好"}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": ANSWER}
RESULT: dict[str, Any] = {
    "role": "tool",
    "content": "Probe reading.",
    "tool_call_id": "probe0001",
    "name": CALL_NAME,
}


def call_message(content: str = "", count: int = 1) -> dict[str, Any]:
    """An assistant that calls."""
    return {"role": "assistant", "content": content, "tool_calls": [_call(n) for n in range(1, count + 1)]}


def _call(number: int) -> dict[str, Any]:
    function = {"name": CALL_NAME, "arguments": {"city": CALL_VALUE}}
    return {"id": f"probe{number:04}", "type": "function", "function": function}
