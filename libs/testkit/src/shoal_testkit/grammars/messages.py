"""The grammar of a Messages stream, on the bytes that a client got.

message_start, ping*, (content_block_start, content_block_delta*, content_block_stop)*, message_delta, message_stop
or, instead of what is left: error
"""

import json
from dataclasses import dataclass, field
from typing import Any

from shoal_testkit.grammars.events import Event, read_named, require

# Kind of block -> its deltas, and the field of the block that each adds to.
_DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}
_STOP_REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")


@dataclass(slots=True)
class _Stream:
    """What was said so far."""

    message: Event | None = None
    blocks: list[Event] = field(default_factory=list)
    is_block_open: bool = False
    is_ending: bool = False
    is_over: bool = False
    error: Event | None = None

    def take(self, event: Event) -> None:
        require(not self.is_over, f"{event['type']} after the end")
        if event["type"] == "ping":
            return
        if event["type"] == "error":
            self.error, self.is_over = event, True
            return
        require((self.message is None) == (event["type"] == "message_start"), f"{event['type']} out of order")
        getattr(self, f"_{event['type']}")(event)

    def _message_start(self, event: Event) -> None:
        message = event["message"]
        require(message["content"] == [] and message["stop_reason"] is None, "the message starts with an end")
        require(message["role"] == "assistant" and message["type"] == "message", "not a message of the assistant")
        self.message = dict(message)

    def _content_block_start(self, event: Event) -> None:
        require(not self.is_block_open and not self.is_ending, "a block inside of a block")
        require(event["index"] == len(self.blocks), f"block {event['index']} after {len(self.blocks)}")
        block = dict(event["content_block"])
        require(block["type"] in _DELTAS, f"a block of type {block['type']!r}")
        if block["type"] == "tool_use":
            require(block["input"] == {} and bool(block["id"]) and bool(block["name"]), f"the call {block}")
            block["partial_json"] = ""
        self.blocks.append(block)
        self.is_block_open = True

    def _content_block_delta(self, event: Event) -> None:
        require(self.is_block_open and event["index"] == len(self.blocks) - 1, "a delta of no open block")
        block, delta = self.blocks[-1], event["delta"]
        name = _DELTAS[block["type"]].get(delta["type"])
        require(name is not None, f"{delta['type']} in a block of {block['type']}")
        assert name is not None
        require(name == "signature" or not block.get("signature"), "a thought after its signature")
        block[name] = block.get(name, "") + delta[name]

    def _content_block_stop(self, event: Event) -> None:
        require(self.is_block_open and event["index"] == len(self.blocks) - 1, "the end of no open block")
        require(self.blocks[-1]["type"] != "thinking" or bool(self.blocks[-1]["signature"]), "a thought unsigned")
        self.is_block_open = False

    def _message_delta(self, event: Event) -> None:
        require(not self.is_block_open and not self.is_ending, "the message ends twice, or inside of a block")
        require(event["delta"]["stop_reason"] in _STOP_REASONS, f"the stop reason {event['delta']['stop_reason']!r}")
        self.is_ending = True
        assert self.message is not None
        started = self.message["usage"]
        for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
            require(isinstance(event["usage"][name], int) and isinstance(started[name], int), f"no {name}")
        self.message |= {**event["delta"], "usage": {**started, **event["usage"]}}

    def _message_stop(self, event: Event) -> None:
        require(self.is_ending, "the message stops without its delta")
        self.is_over = True


def check_messages_stream(raw: bytes) -> Event:
    """The final message, or the error's event."""
    stream = _Stream()
    for event in read_named(raw):
        stream.take(event)
    require(stream.is_over, "the stream has no end")
    if stream.error is not None:
        return stream.error
    message = stream.message
    assert message is not None
    content = [_block(block, message["stop_reason"]) for block in stream.blocks]
    has_calls = any(block["type"] == "tool_use" for block in content)
    require(message["stop_reason"] != "tool_use" or has_calls, "the stop reason tells of a call, and there is none")
    require(message["stop_reason"] != "end_turn" or not has_calls, "there are calls, and the turn is told to end")
    return {**message, "content": content}


def _block(block: Event, stop_reason: str) -> Event:
    if block["type"] != "tool_use":
        return block
    text = block.pop("partial_json")
    if stop_reason == "tool_use":
        told: Any = json.loads(text or "{}")
        require(isinstance(told, dict), "the input of a call is no object")
        block["input"] = told
    return block
