"""Chunks of Chat Completions put together as clients of that API do."""

from typing import Any

from .agent import Event


def assembled(events: list[Event]) -> dict[str, Any]:
    """The message of a stream; calls are keyed by their index, and may be cut off."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event.get("choices") or ():
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for piece in delta.get("tool_calls") or ():
                called = calls.setdefault(piece["index"], {"id": "", "type": "function", "function": {}})
                called["id"] = piece.get("id") or called["id"]
                for name, text in piece.get("function", {}).items():
                    called["function"][name] = called["function"].get(name, "") + (text or "")
    return message | ({"tool_calls": [calls[index] for index in sorted(calls)]} if calls else {})


def usage(events: list[Event]) -> tuple[int, int]:
    """Prompt tokens and hit tokens, from the event that ``include_usage`` asks for."""
    found = next(event["usage"] for event in reversed(events) if event.get("usage"))
    return found["prompt_tokens"], (found.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
