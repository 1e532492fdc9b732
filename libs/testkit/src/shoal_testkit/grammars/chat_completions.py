"""The grammar of a Chat Completions or Completions stream, on the bytes that a client got.

role, delta*, finish_reason for each choice; then, when asked for, one event with the usage and no choices; [DONE]
or: error, [DONE]
"""

import json
from dataclasses import dataclass, field
from typing import Any

from shoal_testkit.grammars.events import DONE, Event, read_blocks, read_json, require

_REASONS = ("stop", "length", "tool_calls", "content_filter")


@dataclass(slots=True)
class _Choice:
    """What was said of one choice so far."""

    message: Event = field(default_factory=lambda: {"role": None, "content": "", "reasoning_content": ""})
    calls: list[Event] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, choice: Event) -> None:
        require(self.finish_reason is None, "a delta after the finish reason")
        if "text" in choice:
            self.message["content"] += choice["text"]
        else:
            self._take_delta(choice["delta"])
        self.finish_reason = choice["finish_reason"]
        require(self.finish_reason in (None, *_REASONS), f"the finish reason {self.finish_reason!r}")

    def _take_delta(self, delta: Event) -> None:
        if self.message["role"] is None:
            require(delta.get("role") == "assistant", "the first delta has no role")
            self.message["role"] = "assistant"
        else:
            require("role" not in delta, "a second role")
        for name in ("content", "reasoning_content"):
            self.message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or ():
            self._take_call(call)

    def _take_call(self, call: Event) -> None:
        kind = "custom" if "custom" in call else "function"
        text = "input" if kind == "custom" else "arguments"
        if call["index"] == len(self.calls):
            require(bool(call.get("id")) and call.get("type") == kind and bool(call[kind].get("name")), f"call {call}")
            self.calls.append({"id": call["id"], "type": kind, kind: {"name": call[kind]["name"], text: ""}})
        require(call["index"] == len(self.calls) - 1, f"the call {call['index']} after {len(self.calls)} calls")
        self.calls[-1][kind][text] += call[kind].get(text) or ""


def check_chat_stream(raw: bytes) -> Event:
    """``{"id", "choices": [{"message", "finish_reason"}], "usage"}``; or the error's event."""
    blocks = read_blocks(raw)
    require(all(len(lines) == 1 for lines in blocks), "an event of several lines")
    require(blocks[-1] == [f"data: {DONE}"], "the stream does not end with [DONE]")
    events = [read_json(lines[0]) for lines in blocks[:-1]]
    require(bool(events), "nothing before [DONE]")
    if "error" in events[-1]:
        require(not any("error" in event for event in events[:-1]), "two errors")
        return events[-1]
    return _check_answer(events)


def _check_answer(events: list[Event]) -> Event:
    require(len({(event["id"], event["created"], event["model"]) for event in events}) == 1, "ids differ")
    choices: dict[int, _Choice] = {}
    usage: Event | None = None
    for event in events:
        require(usage is None, "an event after the usage")
        if not event["choices"]:
            usage = _check_usage(event["usage"])
        for choice in event["choices"]:
            choices.setdefault(choice["index"], _Choice()).take(choice)
    require(sorted(choices) == list(range(len(choices))) and bool(choices), "choices are not numbered")
    return {"id": events[0]["id"], "choices": [_close(choices[n]) for n in sorted(choices)], "usage": usage}


def _close(choice: _Choice) -> Event:
    require(choice.finish_reason is not None, "a choice has no finish reason")
    has_calls = bool(choice.calls)
    require(choice.finish_reason != "tool_calls" or has_calls, "the finish reason tells of calls, and there are none")
    require(choice.finish_reason != "stop" or not has_calls, "there are calls, and the finish reason is stop")
    if choice.finish_reason == "tool_calls":
        for call in choice.calls:
            if call["type"] == "function":
                arguments: Any = json.loads(call["function"]["arguments"])
                require(isinstance(arguments, dict), "the arguments of a call are no object")
    require(len({call["id"] for call in choice.calls}) == len(choice.calls), "two calls have one id")
    return {"message": {**choice.message, "tool_calls": choice.calls}, "finish_reason": choice.finish_reason}


def _check_usage(usage: Event) -> Event:
    require(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], "the total is no sum")
    require(usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"], "more hit than asked")
    details = usage.get("completion_tokens_details") or {}
    require(details.get("reasoning_tokens", 0) <= usage["completion_tokens"], "more reasoning than answer")
    return usage
