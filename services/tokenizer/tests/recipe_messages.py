"""Messages of our conversations and of deepseek-recipe's, in one form to compare them by."""

import json
from typing import Any


def shown(message: dict[str, Any]) -> dict[str, Any]:
    """What both have of a message; a missing reasoning and an empty one are the same in the prompt."""
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return {
        "role": message["role"],
        "content": message["content"],
        "reasoning": message.get("reasoning_content") or "",
        "calls": calls,
        "answers": message.get("tool_call_id"),
    }


def shown_there(message: Any) -> dict[str, Any]:
    """The same of one of recipe's."""
    calls = [(call.id, call.name, json.loads(call.arguments)) for call in message.tool_calls or ()]
    return {
        "role": message.role,
        "content": message.content,
        "reasoning": message.reasoning_content or "",
        "calls": calls,
        "answers": message.tool_call_id,
    }
