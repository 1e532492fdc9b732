"""Completions, the answer: ``text_completion`` events and body.

Everything is text here, whatever a model makes of it in a conversation. Log probabilities have the API's own form:
four lists of equal length; offsets count from the beginning of the answer.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from shoal_tokenizer.codec.api import AnswerEnd, AnswerShape, Delta, Reasoning, ShownFailure, ShownToken, Text
from shoal_tokenizer.codec.events.openai_objects import (
    DONE,
    encode,
    error_object,
    event,
    keep_choice,
    shown_logprob,
    sum_up,
    usage_object,
    with_receipt,
)
from shoal_tokenizer.codec.text_parser import Characters

ID_PREFIX = "cmpl-"


def _spelled(token: bytes) -> str:
    return token.decode(errors="replace")


def _text(delta: Delta) -> str:
    return "".join([part.text for part in delta.parts if isinstance(part, Text | Reasoning)])


def _identity(shape: AnswerShape) -> dict[str, Any]:
    return {
        "id": shape.response_id,
        "object": "text_completion",
        "created": shape.created_s,
        "model": shape.model,
    }


class _Logprobs:
    """Counts where the tokens of one answer begin."""

    __slots__ = ("_characters", "_offset")

    def __init__(self) -> None:
        self._offset = 0
        self._characters = Characters(is_first_space_dropped=False)

    def show(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        spelled = [_spelled(token.spelling) for token in tokens]
        return {
            "tokens": spelled,
            "token_logprobs": [shown_logprob(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": list(self._offsets(tokens)),
        }

    def _offsets(self, tokens: Sequence[ShownToken]) -> Iterator[int]:
        for token in tokens:
            yield self._offset
            self._offset += len(self._characters.push(token.spelling))

    @staticmethod
    def _top(token: ShownToken) -> dict[str, float]:
        """The likeliest, and the one that was taken."""
        return {
            _spelled(name): shown_logprob(logprob) for name, logprob in [*token.top, (token.spelling, token.logprob)]
        }


class CompletionEvents:
    """``EventWriter`` of a streaming request."""

    __slots__ = ("_head", "_logprobs", "_shape", "_tail", "_text_head", "_text_tail", "events", "kept_body")

    def __init__(self, shape: AnswerShape) -> None:
        self.events = 0
        self.kept_body: bytes | None = None
        self._shape = shape
        self._logprobs = _Logprobs()
        self._head = b"data: " + encode(_identity(shape))[:-1] + b',"choices":'
        self._tail = (b',"usage":null' if shape.has_usage_event else b"") + b"}\n\n"
        self._text_head = self._head + b'[{"index":%d,"text":' % shape.choice
        self._text_tail = b',"logprobs":null,"finish_reason":null}]' + self._tail

    def open(self, prompt_tokens: int, hit_tokens: int) -> bytes:
        return b""

    def cancel(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        text = _text(delta)
        if delta.tokens:
            return self._event(text, None, delta.tokens)
        if not text:
            return b""
        self.events += 1
        return b"".join((self._text_head, encode(text), self._text_tail))

    def finish(self, end: AnswerEnd) -> bytes:
        said, last = b"", self._event("", end.finish.value)
        if self._shape.choice:
            self.kept_body = keep_choice(None, end.usage)
            return last
        if self._shape.has_usage_event:
            _, usage = sum_up(None, end)
            said, last = last, self._head + b'[],"usage":' + encode(usage_object(usage)) + b"}\n\n"
            self.events += 1
        return said + with_receipt(last.removesuffix(b"\n\n"), end.receipt_json) + b"\n\n" + DONE

    def fail(self, failure: ShownFailure, receipt_json: bytes | None) -> bytes:
        self.events += 1
        return event(error_object(failure, receipt_json)) + DONE

    def _event(self, text: str, reason: str | None, tokens: Sequence[ShownToken] = ()) -> bytes:
        self.events += 1
        logprobs = self._logprobs.show(tokens) if tokens else None
        choice = {"index": self._shape.choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return self._head + encode([choice]) + self._tail


class CompletionBody:
    """``EventWriter`` of a request that wants one JSON body."""

    __slots__ = ("_shape", "_texts", "_tokens", "events", "kept_body")

    def __init__(self, shape: AnswerShape) -> None:
        self.events = 0
        self.kept_body: bytes | None = None
        self._shape = shape
        self._texts: list[str] = []
        self._tokens: list[ShownToken] = []

    def open(self, prompt_tokens: int, hit_tokens: int) -> bytes:
        return b""

    def cancel(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        self._texts.append(_text(delta))
        self._tokens += delta.tokens
        return b""

    def finish(self, end: AnswerEnd) -> bytes:
        choice = {
            "index": self._shape.choice,
            "text": "".join(self._texts),
            "logprobs": _Logprobs().show(self._tokens) if self._shape.has_logprobs else None,
            "finish_reason": end.finish.value,
        }
        if self._shape.choice:
            self.kept_body = keep_choice(choice, end.usage)
            return b""
        choices, usage = sum_up(choice, end)
        body = {**_identity(self._shape), "choices": choices, "usage": usage_object(usage)}
        return with_receipt(encode(body), end.receipt_json)

    def fail(self, failure: ShownFailure, receipt_json: bytes | None) -> bytes:
        return error_object(failure, receipt_json)


def write_completion(shape: AnswerShape) -> CompletionEvents | CompletionBody:
    """The writer that ``shape`` asks for."""
    return CompletionEvents(shape) if shape.is_stream else CompletionBody(shape)
