"""Responses, the answer: the events of its grammar, or the Response object alone.

    created, in_progress, (output_item.added, [content_part.added], deltas, done, [content_part.done],
    output_item.done)*, completed | incomplete | failed

Sequence numbers count the events of the answer from 0; they go on where another instance stopped, because whoever
resumes sets ``events``. docs/decisions/0014-one-owner-for-each-grammar.md
"""

from typing import Any

import msgspec

from shoal_tokenizer.codec.api import (
    AnswerEnd,
    AnswerShape,
    CallBegin,
    CallEnd,
    Delta,
    Finish,
    Part,
    Reasoning,
    ShownFailure,
    ShownToken,
    Text,
)
from shoal_tokenizer.codec.events.responses_items import (
    CallItem,
    CustomCallItem,
    Fields,
    MessageItem,
    OutputItem,
    ReasoningItem,
    event_bytes,
)
from shoal_tokenizer.codec.events.responses_object import error_object, read_echo, response_object, usage_object

_encode = msgspec.json.Encoder().encode


class ResponsesWriter:
    """``EventWriter`` of one answer. Without a stream it says nothing until the end, and then the whole object."""

    def __init__(self, shape: AnswerShape) -> None:
        self.events = 0
        self.kept_body: bytes | None = None
        self._shape = shape
        self._echo = read_echo(shape.echo)
        self._is_opened = False
        self._done: list[Fields] = []
        self._item: OutputItem | None = None
        self._tokens: list[ShownToken] = []  # whose text did not come yet

    def open(self, prompt_tokens: int, hit_tokens: int) -> bytes:
        self._is_opened = True
        begun = msgspec.Raw(response_object(self._shape, self._echo, "in_progress", []))
        return self._tell(
            [
                {"type": "response.created", "response": begun},
                {"type": "response.in_progress", "response": begun},
            ]
        )

    def delta(self, delta: Delta) -> bytes:
        self._tokens += delta.tokens
        said = [self._take(part) for part in delta.parts]
        if self._tokens and isinstance(self._item, MessageItem):
            said.append(self._add("", self._item))
        return b"".join(said)

    def finish(self, end: AnswerEnd) -> bytes:
        is_cut = end.finish is Finish.LENGTH
        said = self._close(is_cut)
        more: dict[str, Any] = {"usage": usage_object(end.usage)}
        if is_cut:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        return said + self._end("incomplete" if is_cut else "completed", end.receipt_json, **more)

    def cancel(self) -> bytes:
        """The API has no event for it: the stream of a background answer ends as incomplete, its status says why."""
        said = b"" if self._is_opened else self.open(0, 0)
        said += self._end("cancelled", None)
        return said if self._echo.is_background and self._shape.is_stream else b""

    def fail(self, failure: ShownFailure, receipt_json: bytes | None) -> bytes:
        said = b"" if self._is_opened else self.open(0, 0)
        said += self._end("failed", receipt_json, error=error_object(failure))
        if self._shape.is_stream:
            return said
        error = {
            "message": failure.message,
            "type": "invalid_request_error" if failure.is_callers else "server_error",
            "param": failure.param,
            "code": failure.code,
        }
        return _encode({"error": error, **_receipt(receipt_json)})

    def _take(self, part: Part) -> bytes:
        if isinstance(part, Text):
            return self._say(part.text, MessageItem)
        if isinstance(part, Reasoning):
            return self._say(part.text, ReasoningItem)
        if isinstance(part, CallBegin):
            kind = CustomCallItem if part.name in self._shape.custom_tools else CallItem
            return self._begin(kind(self._shape, self._next_index(), part.name))
        if not isinstance(self._item, CallItem):
            return b""
        if isinstance(part, CallEnd):
            self._item.is_ended = True
            return self._close(is_cut=False)
        return self._add(part.text, self._item)

    def _say(self, text: str, kind: type[OutputItem]) -> bytes:
        said = b""
        if not isinstance(self._item, kind):
            said = self._begin(self._new_item(kind))
        assert self._item is not None
        return said + self._add(text, self._item)

    def _new_item(self, kind: type[OutputItem]) -> OutputItem:
        if kind is ReasoningItem:
            return ReasoningItem(self._shape, self._next_index(), self._echo.has_carried_reasoning)
        return kind(self._shape, self._next_index())

    def _next_index(self) -> int:
        return len(self._done) + (self._item is not None)

    def _begin(self, item: OutputItem) -> bytes:
        said = self._close(is_cut=False)
        self._item = item
        return said + self._tell(item.opening())

    def _add(self, piece: str, item: OutputItem) -> bytes:
        text = item.take(piece)
        tokens: list[ShownToken] = []
        if self._tokens and isinstance(item, MessageItem):
            tokens, self._tokens = self._tokens, []
        if not text and not tokens:
            return b""
        if tokens and isinstance(item, MessageItem):
            event = item.delta_with(text, tokens, self.events)
        elif self._shape.is_stream:
            event = item.delta(text, self.events)
        else:
            return b""
        self.events += self._shape.is_stream
        return event if self._shape.is_stream else b""

    def _close(self, is_cut: bool) -> bytes:
        """The open item is done. A call that nobody ended was cut, whatever the answer ended with."""
        item, self._item = self._item, None
        if item is None:
            return b""
        is_whole = item.is_ended if isinstance(item, CallItem) else not is_cut
        status = "completed" if is_whole else "incomplete"
        self._done.append(item.show(status))
        return self._tell(item.closing(status))

    def _end(self, status: str, receipt_json: bytes | None, **more: Any) -> bytes:
        """The last event, or the body. An item that is still open was broken off: it is shown, and not told as done."""
        output = self._done + ([self._item.show("incomplete")] if self._item is not None else [])
        response = response_object(self._shape, self._echo, status, output, **more)
        if self._shape.is_kept:
            self.kept_body = response
        if self._shape.is_stream:
            kind = "incomplete" if status == "cancelled" else status
            event = {"type": f"response.{kind}", "response": msgspec.Raw(response), **_receipt(receipt_json)}
            return self._tell([event])
        if receipt_json is None:
            return response
        return response[:-1] + b',"shoal_receipt":' + receipt_json + b"}"

    def _tell(self, events: list[Fields]) -> bytes:
        if not self._shape.is_stream:
            return b""
        said = b""
        for fields in events:
            said += event_bytes({**fields, "sequence_number": self.events})
            self.events += 1
        return said


def _receipt(receipt_json: bytes | None) -> dict[str, Any]:
    return {} if receipt_json is None else {"shoal_receipt": msgspec.Raw(receipt_json)}


def write_response(shape: AnswerShape) -> ResponsesWriter:
    """The writer that ``shape`` asks for."""
    return ResponsesWriter(shape)
