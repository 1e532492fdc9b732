"""Messages, the answer: events from ``message_start`` to ``message_stop``, and the ``message`` body.

An answer is blocks in order: what was thought, text, calls. Input tokens are told in the first event as they are known
then, and again in the last ones. Anthropic counts what was read from the cache apart from ``input_tokens``. The
signature of a thought is the thought itself in another form: clients that leave the text out still send it back.
"""

from typing import Any

import msgspec

from shoal_tokenizer.codec.api import (
    AnswerEnd,
    AnswerShape,
    CallArguments,
    CallBegin,
    Delta,
    Finish,
    Part,
    Reasoning,
    ShownFailure,
    Text,
)
from shoal_tokenizer.codec.events.carried_reasoning import carry
from shoal_tokenizer.codec.events.openai_objects import with_receipt

ID_PREFIX = "msg_"
_encode = msgspec.json.Encoder().encode
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_CALLERS_ERRORS = {"model_not_found": "not_found_error", "request_too_large": "request_too_large"}
_OUR_ERRORS = {
    "rate_limited": "rate_limit_error",
    "overloaded": "overloaded_error",
    "draining": "overloaded_error",
    "deadline_exceeded": "timeout_error",
}


def write_count(prompt_tokens: int) -> bytes:
    """The body of ``count_tokens``."""
    return _encode({"input_tokens": prompt_tokens})


def _input_usage(prompt_tokens: int, hit_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens - hit_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": hit_tokens,
    }


def _usage(end: AnswerEnd) -> dict[str, Any]:
    usage = end.usage
    return {
        **_input_usage(usage.prompt_tokens, usage.hit_tokens),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _error(shape: AnswerShape, failure: ShownFailure, receipt_json: bytes | None) -> bytes:
    if failure.is_callers:
        kind = _CALLERS_ERRORS.get(failure.code, "invalid_request_error")
    else:
        kind = _OUR_ERRORS.get(failure.code, "api_error")
    shown = {
        "type": "error",
        "error": {"type": kind, "message": failure.message},
        "request_id": shape.response_id.removeprefix(ID_PREFIX),
    }
    return with_receipt(_encode(shown), receipt_json)


def _call_id(shape: AnswerShape, number: int) -> str:
    return f"toolu_{shape.response_id.removeprefix(ID_PREFIX)}_{number}"


class _Ending:
    """Why the turn ended, in Anthropic's words."""

    def __init__(self, end: AnswerEnd, *, has_calls: bool) -> None:
        self.sequence = end.stop_string if end.finish is Finish.STOP else None
        if end.finish is Finish.LENGTH:
            self.reason = "max_tokens"
        elif self.sequence is not None:
            self.reason = "stop_sequence"
        else:
            self.reason = "tool_use" if has_calls else "end_turn"


class MessageEvents:
    """``EventWriter`` of a streaming request."""

    __slots__ = ("_block", "_calls", "_delta_head", "_index", "_reasoning", "_shape", "events", "kept_body")

    def __init__(self, shape: AnswerShape) -> None:
        self.events = 0
        self.kept_body: bytes | None = None
        self._shape = shape
        self._index = -1
        self._block: str | None = None  # kind of the open one
        self._calls = 0
        self._reasoning: list[str] = []  # of the open block, for its signature
        self._delta_head = b""

    def open(self, prompt_tokens: int, hit_tokens: int) -> bytes:
        message: dict[str, Any] = {
            "id": self._shape.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._shape.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_input_usage(prompt_tokens, hit_tokens), "output_tokens": 0},
        }
        self.events += 1
        return self._event("message_start", {"message": message}) + _PING

    def delta(self, delta: Delta) -> bytes:
        return b"".join([self._take(part) for part in delta.parts])

    def finish(self, end: AnswerEnd) -> bytes:
        closing = self._close_block()
        ending = _Ending(end, has_calls=self._calls > 0)
        told = {"delta": {"stop_reason": ending.reason, "stop_sequence": ending.sequence}, "usage": _usage(end)}
        last = with_receipt(_encode({"type": "message_delta", **told}), end.receipt_json)
        self.events += 1
        return closing + b"event: message_delta\ndata: " + last + b"\n\n" + self._event("message_stop", {})

    def cancel(self) -> bytes:
        return b""

    def fail(self, failure: ShownFailure, receipt_json: bytes | None) -> bytes:
        self.events += 1
        return b"event: error\ndata: " + _error(self._shape, failure, receipt_json) + b"\n\n"

    def _take(self, part: Part) -> bytes:
        if isinstance(part, Text):
            return self._in_block("text", {"text": ""}) + self._say(part.text)
        if isinstance(part, Reasoning):
            return self._think(part.text)
        if isinstance(part, CallBegin):
            closing = self._close_block()
            block = {"id": _call_id(self._shape, self._calls), "name": part.name, "input": {}}
            self._calls += 1
            return closing + self._in_block("tool_use", block)
        if isinstance(part, CallArguments) and self._block == "tool_use":
            return self._say(part.text)
        return b""

    def _think(self, text: str) -> bytes:
        opening = self._in_block("thinking", {"thinking": "", "signature": ""})
        self._reasoning.append(text)
        return opening + (self._say(text) if self._shape.is_reasoning_shown else b"")

    def _in_block(self, kind: str, fields: dict[str, Any]) -> bytes:
        """The start of a block of this kind; nothing when one is open."""
        if self._block == kind:
            return b""
        closing = self._close_block()
        self._index += 1
        self._block = kind
        name, field = {
            "text": ("text_delta", "text"),
            "thinking": ("thinking_delta", "thinking"),
            "tool_use": ("input_json_delta", "partial_json"),
        }[kind]
        self._delta_head = (
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self._index},'
            f'"delta":{{"type":"{name}","{field}":'
        ).encode()
        started = {"index": self._index, "content_block": {"type": kind, **fields}}
        return closing + self._event("content_block_start", started)

    def _say(self, text: str) -> bytes:
        self.events += 1
        return b"".join((self._delta_head, _encode(text), b"}}\n\n"))

    def _close_block(self) -> bytes:
        if self._block is None:
            return b""
        signed = b""
        if self._block == "thinking":
            delta = {"type": "signature_delta", "signature": carry("".join(self._reasoning))}
            signed = self._event("content_block_delta", {"index": self._index, "delta": delta})
            self._reasoning = []
        self._block = None
        return signed + self._event("content_block_stop", {"index": self._index})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        self.events += 1
        return f"event: {name}\ndata: ".encode() + _encode({"type": name, **fields}) + b"\n\n"


class MessageBody:
    """``EventWriter`` of a request that wants one JSON body."""

    __slots__ = ("_blocks", "_shape", "events", "kept_body")

    def __init__(self, shape: AnswerShape) -> None:
        self.events = 0
        self.kept_body: bytes | None = None
        self._shape = shape
        self._blocks: list[tuple[str, str, list[str]]] = []  # kind, name of a call, pieces

    def open(self, prompt_tokens: int, hit_tokens: int) -> bytes:
        return b""

    def cancel(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        for part in delta.parts:
            if isinstance(part, Text):
                self._add("text", part.text)
            elif isinstance(part, Reasoning):
                self._add("thinking", part.text)
            elif isinstance(part, CallBegin):
                self._blocks.append(("tool_use", part.name, []))
            elif isinstance(part, CallArguments):
                self._add("tool_use", part.text)
        return b""

    def finish(self, end: AnswerEnd) -> bytes:
        ending = _Ending(end, has_calls=any(kind == "tool_use" for kind, _name, _pieces in self._blocks))
        body = {
            "id": self._shape.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._shape.model,
            "content": self._content(),
            "stop_reason": ending.reason,
            "stop_sequence": ending.sequence,
            "usage": _usage(end),
        }
        return with_receipt(_encode(body), end.receipt_json)

    def fail(self, failure: ShownFailure, receipt_json: bytes | None) -> bytes:
        return _error(self._shape, failure, receipt_json)

    def _add(self, kind: str, text: str) -> None:
        if not self._blocks or self._blocks[-1][0] != kind:
            self._blocks.append((kind, "", []))
        self._blocks[-1][2].append(text)

    def _content(self) -> list[dict[str, Any]]:
        shown: list[dict[str, Any]] = []
        calls = 0
        for kind, name, pieces in self._blocks:
            text = "".join(pieces)
            if kind == "text":
                shown.append({"type": "text", "text": text})
            elif kind == "thinking":
                thinking = text if self._shape.is_reasoning_shown else ""
                shown.append({"type": "thinking", "thinking": thinking, "signature": carry(text)})
            else:
                call_id = _call_id(self._shape, calls)
                shown.append({"type": "tool_use", "id": call_id, "name": name, "input": _input(text)})
                calls += 1
        return shown


def _input(text: str) -> Any:
    """The arguments of a call. One inside of which the answer ended has none that could be told as an object."""
    try:
        return msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}


def write_message(shape: AnswerShape) -> MessageEvents | MessageBody:
    """The writer that ``shape`` asks for."""
    return MessageEvents(shape) if shape.is_stream else MessageBody(shape)
