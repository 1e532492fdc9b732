"""Chat Completions, the answer: ``chat.completion.chunk`` events and the ``chat.completion`` body.

Shapes and order are OpenAI's: a role event with the first tokens, deltas, the finish reason, an event of its own with
``choices: []`` for the usage when asked for, ``[DONE]``. Reasoning is ``reasoning_content``, DeepSeek's field, which
agents read. The route receipt stands in the last JSON object. Everything of an event that does not change is encoded
once an answer, and once a call; a delta costs one escape and one join.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

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
    ShownToken,
    Text,
)
from shoal_tokenizer.codec.events.custom_input import CustomInput
from shoal_tokenizer.codec.events.openai_objects import (
    DONE,
    encode,
    error_object,
    event,
    keep_choice,
    show_logprobs,
    sum_up,
    usage_object,
    with_receipt,
)

ID_PREFIX = "chatcmpl-"
_Frame: TypeAlias = tuple[bytes, bytes]  # what stands around the text of a delta


class _Call:
    """One call of the answer, in the words of its kind of tool."""

    __slots__ = ("_input", "field", "id", "kind", "name")

    def __init__(self, shape: AnswerShape, index: int, name: str) -> None:
        choice = f"_{shape.choice}" if shape.choice else ""
        self.id = f"call_{shape.response_id.removeprefix(ID_PREFIX)}{choice}_{index}"
        self.name = name
        is_custom = name in shape.custom_tools
        self.kind, self.field = ("custom", "input") if is_custom else ("function", "arguments")
        self._input = CustomInput() if is_custom else None

    def take(self, arguments: str) -> str:
        """What a piece of the arguments adds to the text that clients see."""
        return arguments if self._input is None else self._input.push(arguments)

    def show(self, text: str) -> dict[str, Any]:
        return {"id": self.id, "type": self.kind, self.kind: {"name": self.name, self.field: text}}


class ChatCompletionEvents:
    """``EventWriter`` of a streaming request."""

    __slots__ = (
        "_arguments",
        "_call",
        "_calls",
        "_head",
        "_reasoning",
        "_shape",
        "_tail",
        "_text",
        "events",
        "kept_body",
    )

    def __init__(self, shape: AnswerShape) -> None:
        self.events = 0
        self.kept_body: bytes | None = None
        self._shape = shape
        self._call: _Call | None = None
        self._calls = 0
        identity = {
            "id": shape.response_id,
            "object": "chat.completion.chunk",
            "created": shape.created_s,
            "model": shape.model,
        }
        self._head = b"data: " + encode(identity)[:-1] + b',"choices":'
        self._tail = (b',"usage":null' if shape.has_usage_event else b"") + b"}\n\n"
        self._text = self._frame(b'{"content":', b"}")
        self._reasoning = self._frame(b'{"reasoning_content":', b"}")
        self._arguments: _Frame = (b"", b"")  # of the open call

    def open(self, prompt_tokens: int, hit_tokens: int) -> bytes:
        return self._event({"role": "assistant", "content": "", "refusal": None})

    def delta(self, delta: Delta) -> bytes:
        parts = delta.parts
        if delta.tokens:
            return self._delta_with_tokens(parts, delta.tokens)
        if len(parts) == 1:
            return self._take(parts[0])
        return b"".join([self._take(part) for part in parts])

    def finish(self, end: AnswerEnd) -> bytes:
        shape = self._shape
        reason = "tool_calls" if self._calls and end.finish is Finish.STOP else end.finish.value
        last = self._event({}, reason)
        if shape.choice:
            self.kept_body = keep_choice(None, end.usage)
            return last
        said = b""
        if shape.has_usage_event:
            _, usage = sum_up(None, end)
            said, last = last, self._head + b'[],"usage":' + encode(usage_object(usage)) + b"}\n\n"
            self.events += 1
        last = with_receipt(last.removesuffix(b"\n\n"), end.receipt_json) + b"\n\n"
        return said + last + DONE

    def cancel(self) -> bytes:
        return b""

    def fail(self, failure: ShownFailure, receipt_json: bytes | None) -> bytes:
        self.events += 1
        return event(error_object(failure, receipt_json)) + DONE

    def _take(self, part: Part) -> bytes:
        if isinstance(part, Text):
            return self._say(self._text, part.text)
        if isinstance(part, Reasoning):
            return self._say(self._reasoning, part.text)
        if isinstance(part, CallBegin):
            return self._begin(part.name)
        if isinstance(part, CallArguments) and self._call is not None:
            text = self._call.take(part.text)
            return self._say(self._arguments, text) if text else b""
        return b""

    def _begin(self, name: str) -> bytes:
        index = self._calls
        call = self._call = _Call(self._shape, index, name)
        self._calls += 1
        begin = f'{{"tool_calls":[{{"index":{index},"{call.kind}":{{"{call.field}":'
        self._arguments = self._frame(begin.encode(), b"}}]}")
        return self._event({"tool_calls": [{"index": index, **call.show("")}]})

    def _delta_with_tokens(self, parts: Sequence[Part], tokens: Sequence[ShownToken]) -> bytes:
        """The tokens are those of all texts; they come with the first, or alone while their text is withheld."""
        first = next((place for place, part in enumerate(parts) if isinstance(part, Text)), None)
        if first is None:
            return self._event({"content": ""}, None, tokens) + b"".join([self._take(part) for part in parts])
        before, text, behind = parts[:first], parts[first], parts[first + 1 :]
        assert isinstance(text, Text)
        said = b"".join([self._take(part) for part in before]) + self._event({"content": text.text}, None, tokens)
        return said + b"".join([self._take(part) for part in behind])

    def _say(self, frame: _Frame, text: str) -> bytes:
        self.events += 1
        return b"".join((frame[0], encode(text), frame[1]))

    def _frame(self, begin: bytes, end: bytes) -> _Frame:
        """Of events that differ in one text only; ``begin`` and ``end`` are what the delta has around it."""
        head = self._head + b'[{"index":%d,"delta":' % self._shape.choice + begin
        return head, end + b',"logprobs":null,"finish_reason":null}]' + self._tail

    def _event(self, delta: dict[str, Any], reason: str | None = None, tokens: Sequence[ShownToken] = ()) -> bytes:
        self.events += 1
        logprobs = {"content": show_logprobs(tokens), "refusal": None} if tokens else None
        choice = {"index": self._shape.choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._head + encode([choice]) + self._tail


class ChatCompletionBody:
    """``EventWriter`` of a request that wants one JSON body."""

    __slots__ = ("_calls", "_reasoning", "_shape", "_texts", "_tokens", "events", "kept_body")

    def __init__(self, shape: AnswerShape) -> None:
        self.events = 0
        self.kept_body: bytes | None = None
        self._shape = shape
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[_Call, list[str]]] = []
        self._tokens: list[ShownToken] = []

    def open(self, prompt_tokens: int, hit_tokens: int) -> bytes:
        return b""

    def cancel(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        self._tokens += delta.tokens
        for part in delta.parts:
            if isinstance(part, Text):
                self._texts.append(part.text)
            elif isinstance(part, Reasoning):
                self._reasoning.append(part.text)
            elif isinstance(part, CallBegin):
                self._calls.append((_Call(self._shape, len(self._calls), part.name), []))
            elif isinstance(part, CallArguments) and self._calls:
                call, pieces = self._calls[-1]
                pieces.append(call.take(part.text))
        return b""

    def finish(self, end: AnswerEnd) -> bytes:
        shape = self._shape
        reason = "tool_calls" if self._calls and end.finish is Finish.STOP else end.finish.value
        logprobs = {"content": show_logprobs(self._tokens), "refusal": None} if shape.has_logprobs else None
        choice = {
            "index": shape.choice,
            "message": self._message(),
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        if shape.choice:
            self.kept_body = keep_choice(choice, end.usage)
            return b""
        choices, usage = sum_up(choice, end)
        body = {
            "id": shape.response_id,
            "object": "chat.completion",
            "created": shape.created_s,
            "model": shape.model,
            "choices": choices,
            "usage": usage_object(usage),
        }
        return with_receipt(encode(body), end.receipt_json)

    def fail(self, failure: ShownFailure, receipt_json: bytes | None) -> bytes:
        return error_object(failure, receipt_json)

    def _message(self) -> dict[str, Any]:
        """``content`` is null where the model only called tools."""
        text = "".join(self._texts)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not text else text,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [call.show("".join(pieces)) for call, pieces in self._calls]
        return message


def write_chat_completion(shape: AnswerShape) -> ChatCompletionEvents | ChatCompletionBody:
    """The writer that ``shape`` asks for."""
    return ChatCompletionEvents(shape) if shape.is_stream else ChatCompletionBody(shape)
