"""Chat Completions, the answer: ``chat.completion.chunk`` events and the ``chat.completion`` body.

Shapes and order are OpenAI's: a role event with the first tokens, deltas, the finish reason, an event of its own with
``choices: []`` for the usage when asked for, ``[DONE]``. The route receipt stands in the last JSON object. Everything
of an event that does not change is encoded once an answer; a delta costs one escape and one join.
"""

from typing import Any

import msgspec

from shoal_tokenizer.codec.api import AnswerShape, Delta, Finish, ShownFailure, ShownToken, Usage

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.hit_tokens},
    }


def _token(spelling: bytes, logprob: float) -> dict[str, Any]:
    # JSON has no infinity: an impossible token gets the number that OpenAI writes for it.
    return {"token": spelling.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(spelling)}


def _logprobs(tokens: list[ShownToken]) -> dict[str, Any]:
    shown = [
        {**_token(token.spelling, token.logprob), "top_logprobs": [_token(*entry) for entry in token.top]}
        for token in tokens
    ]
    return {"content": shown, "refusal": None}


def _failure(failure: ShownFailure) -> dict[str, Any]:
    return {
        "message": failure.message,
        "type": "invalid_request_error" if failure.is_callers else "server_error",
        "param": failure.param,
        "code": failure.code,
    }


def _receipt(receipt_json: bytes | None) -> dict[str, Any]:
    return {} if receipt_json is None else {"shoal_receipt": msgspec.Raw(receipt_json)}


class ChatCompletionEvents:
    """``EventWriter`` of a streaming request."""

    __slots__ = ("_head", "_is_begun", "_is_plain", "_shape", "_tail", "_text_head", "_text_tail")

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape
        self._is_begun = False
        self._is_plain = not shape.has_logprobs
        identity = {
            "id": shape.response_id,
            "object": "chat.completion.chunk",
            "created": shape.created_s,
            "model": shape.model,
        }
        self._head = b"data: " + _encode(identity)[:-1] + b',"choices":'
        self._tail = (b',"usage":null' if shape.has_usage_event else b"") + b"}\n\n"
        self._text_head = self._head + b'[{"index":0,"delta":{"content":'
        self._text_tail = b'},"logprobs":null,"finish_reason":null}]' + self._tail

    def resume(self) -> None:
        self._is_begun = True

    def delta(self, delta: Delta) -> bytes:
        begin = b"" if self._is_begun else self._begin()
        if self._is_plain:
            return b"".join((begin, self._text_head, _encode(delta.text), self._text_tail)) if delta.text else begin
        if not delta.text and not delta.tokens:
            return begin
        return begin + self._event({"content": delta.text}, None, _logprobs(delta.tokens))

    def finish(self, finish: Finish, usage: Usage, receipt_json: bytes | None) -> bytes:
        begin = b"" if self._is_begun else self._begin()
        receipt = _encode(_receipt(receipt_json))[1:-1]
        ending = self._event({}, finish.value, None)
        if self._shape.has_usage_event:
            last = self._head + b'[],"usage":' + _encode(_usage(usage)) + b"}\n\n"
        else:
            ending, last = b"", ending
        if receipt:
            last = last.removesuffix(b"}\n\n") + b"," + receipt + b"}\n\n"
        return begin + ending + last + _DONE

    def fail(self, failure: ShownFailure, receipt_json: bytes | None) -> bytes:
        return b"data: " + _encode({"error": _failure(failure), **_receipt(receipt_json)}) + b"\n\n" + _DONE

    def _begin(self) -> bytes:
        self._is_begun = True
        return self._event({"role": "assistant", "content": "", "refusal": None}, None, None)

    def _event(self, delta: dict[str, Any], finish_reason: str | None, logprobs: dict[str, Any] | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head + _encode([choice]) + self._tail


class ChatCompletionBody:
    """``EventWriter`` of a request that wants one JSON body."""

    __slots__ = ("_shape", "_texts", "_tokens")

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape
        self._texts: list[str] = []
        self._tokens: list[ShownToken] = []

    def resume(self) -> None:
        """A body has no opening."""

    def delta(self, delta: Delta) -> bytes:
        self._texts.append(delta.text)
        self._tokens += delta.tokens
        return b""

    def finish(self, finish: Finish, usage: Usage, receipt_json: bytes | None) -> bytes:
        shape = self._shape
        message = {"role": "assistant", "content": "".join(self._texts), "refusal": None}
        body = {
            "id": shape.response_id,
            "object": "chat.completion",
            "created": shape.created_s,
            "model": shape.model,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "logprobs": _logprobs(self._tokens) if shape.has_logprobs else None,
                    "finish_reason": finish.value,
                }
            ],
            "usage": _usage(usage),
        }
        return _encode(body | _receipt(receipt_json))

    def fail(self, failure: ShownFailure, receipt_json: bytes | None) -> bytes:
        return _encode({"error": _failure(failure), **_receipt(receipt_json)})


def write_chat_completion(shape: AnswerShape) -> ChatCompletionEvents | ChatCompletionBody:
    """The writer that ``shape`` asks for."""
    return ChatCompletionEvents(shape) if shape.is_stream else ChatCompletionBody(shape)
