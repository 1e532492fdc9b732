"""Output items of the Responses API while they grow: their events, and how they look when they are done.

Ids derive from the request and the item's place, so another instance that goes on with the answer makes the same ones.
"""

from typing import Any, ClassVar, TypeAlias

import msgspec

from shoal_tokenizer.codec.api import AnswerShape, ShownToken
from shoal_tokenizer.codec.events.carried_reasoning import carry
from shoal_tokenizer.codec.events.custom_input import CustomInput
from shoal_tokenizer.codec.events.openai_objects import show_logprobs

Fields: TypeAlias = dict[str, Any]

RESPONSE_PREFIX = "resp_"
_encode = msgspec.json.Encoder().encode


def event_bytes(fields: Fields) -> bytes:
    """One event as it goes to the client."""
    return f"event: {fields['type']}\ndata: ".encode() + _encode(fields) + b"\n\n"


class OutputItem:
    """One item of one answer."""

    prefix: ClassVar[str]
    delta_type: ClassVar[str]
    place: ClassVar[Fields] = {}  # of its text inside of the item
    delta_end: ClassVar[bytes] = b""  # what its delta events have beyond the text

    def __init__(self, shape: AnswerShape, index: int) -> None:
        request_id = shape.response_id.removeprefix(RESPONSE_PREFIX)
        self.id = f"{self.prefix}_{request_id}_{index}"
        self.index = index
        self._texts: list[str] = []
        head = {"type": self.delta_type, **self._where()}
        begin = b"event: " + self.delta_type.encode() + b"\ndata: " + _encode(head)[:-1]
        self._delta_head = begin + b',"delta":'
        self._delta_tail = self.delta_end + b',"sequence_number":'

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def take(self, piece: str) -> str:
        """Add a piece; returns what it adds to the text that clients see."""
        self._texts.append(piece)
        return piece

    def delta(self, text: str, sequence_number: int) -> bytes:
        """The event for ``text`` that was just added. Most of an answer is this: one escape and one join."""
        return b"".join((self._delta_head, _encode(text), self._delta_tail, b"%d}\n\n" % sequence_number))

    def opening(self) -> list[Fields]:
        """Events before the first piece."""
        return [{"type": "response.output_item.added", "output_index": self.index, "item": self.show("in_progress")}]

    def closing(self, status: str) -> list[Fields]:
        """Events after the last piece."""
        return [{"type": "response.output_item.done", "output_index": self.index, "item": self.show(status)}]

    def show(self, status: str) -> Fields:
        raise NotImplementedError

    def _where(self) -> Fields:
        return {"item_id": self.id, "output_index": self.index, **self.place}


class _ItemOfParts(OutputItem):
    """An item whose text is a content part."""

    place: ClassVar[Fields] = {"content_index": 0}

    def opening(self) -> list[Fields]:
        return [*super().opening(), {"type": "response.content_part.added", **self._where(), "part": self._part()}]

    def closing(self, status: str) -> list[Fields]:
        done = {"type": self.delta_type.replace(".delta", ".done"), **self._where(), **self._done()}
        part = {"type": "response.content_part.done", **self._where(), "part": self._part()}
        return [done, part, *super().closing(status)]

    def _done(self) -> Fields:
        return {"text": self.text}

    def _part(self) -> Fields:
        raise NotImplementedError

    def _parts(self, status: str) -> list[Fields]:
        return [] if status == "in_progress" else [self._part()]


class MessageItem(_ItemOfParts):
    """Text of the answer proper; the kind whose tokens can be shown with log probabilities."""

    prefix = "msg"
    delta_type = "response.output_text.delta"
    delta_end = b',"logprobs":[]'

    def __init__(self, shape: AnswerShape, index: int) -> None:
        super().__init__(shape, index)
        self._logprobs: list[Fields] = []

    def delta_with(self, text: str, tokens: list[ShownToken], sequence_number: int) -> bytes:
        """A delta with its tokens."""
        shown = show_logprobs(tokens)
        self._logprobs += shown
        fields = {"type": self.delta_type, **self._where(), "delta": text, "logprobs": shown}
        return event_bytes({**fields, "sequence_number": sequence_number})

    def show(self, status: str) -> Fields:
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": self._parts(status),
        }

    def _done(self) -> Fields:
        return {"text": self.text, "logprobs": self._logprobs}

    def _part(self) -> Fields:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}


class ReasoningItem(_ItemOfParts):
    """What the model thinks, as text; there is nobody here to sum it up."""

    prefix = "rs"
    delta_type = "response.reasoning_text.delta"

    def __init__(self, shape: AnswerShape, index: int, is_carried: bool) -> None:
        super().__init__(shape, index)
        self._is_carried = is_carried

    def show(self, status: str) -> Fields:
        item = {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": self._parts(status)}
        if self._is_carried and status != "in_progress":
            item["encrypted_content"] = carry(self.text)
        return item

    def _part(self) -> Fields:
        return {"type": "reasoning_text", "text": self.text}


class CallItem(OutputItem):
    """A call of a function, by the name that the request gave it."""

    prefix = "fc"
    delta_type = "response.function_call_arguments.delta"
    kind: ClassVar[str] = "function_call"
    field: ClassVar[str] = "arguments"

    def __init__(self, shape: AnswerShape, index: int, name: str) -> None:
        super().__init__(shape, index)
        self.is_ended = False
        request_id = shape.response_id.removeprefix(RESPONSE_PREFIX)
        namespace, shown_name = shape.namespaces.get(name, (None, name))
        self._called: Fields = {"call_id": f"call_{request_id}_{index}", "name": shown_name}
        if namespace is not None:
            self._called["namespace"] = namespace

    def closing(self, status: str) -> list[Fields]:
        done = {"type": self.delta_type.replace(".delta", ".done"), **self._where(), self.field: self.text}
        return [done, *super().closing(status)]

    def show(self, status: str) -> Fields:
        return {"id": self.id, "type": self.kind, "status": status, **self._called, self.field: self.text}


class CustomCallItem(CallItem):
    """A call of a tool that takes one text: what the model wrote as JSON comes out as that text."""

    prefix = "ctc"
    delta_type = "response.custom_tool_call_input.delta"
    kind = "custom_tool_call"
    field = "input"

    def __init__(self, shape: AnswerShape, index: int, name: str) -> None:
        super().__init__(shape, index, name)
        self._input = CustomInput()

    def take(self, piece: str) -> str:
        return super().take(self._input.push(piece))
