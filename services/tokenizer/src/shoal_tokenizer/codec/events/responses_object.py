"""The Response object: what every life stage of an answer shows, and what it repeats of the request.

The request's part is encoded once, by the converter, and goes through as bytes: instructions and tools are long, and a
stream shows them three times.
"""

from typing import Any

import msgspec

from shoal_tokenizer.codec.api import AnswerShape, ShownFailure, Usage

_encode = msgspec.json.Encoder().encode

# By the names of our error codes; the API knows no more of them than these.
_ERROR_CODES = {"rate_limited": "rate_limit_exceeded", "overloaded": "rate_limit_exceeded"}


class Echo(msgspec.Struct, frozen=True):
    """``AnswerShape.echo``: the fields of the request, and what of it only the writer needs."""

    fields: msgspec.Raw
    is_background: bool = False
    has_carried_reasoning: bool = False


read_echo = msgspec.json.Decoder(Echo).decode
write_echo = _encode


def usage_object(usage: Usage) -> dict[str, Any]:
    # How much is written to the store is decided after the answer: 0 is what the API has for "not told".
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.hit_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def error_object(failure: ShownFailure) -> dict[str, Any]:
    """``type`` keeps our own code, which says more than the API's."""
    code = "invalid_prompt" if failure.is_callers else _ERROR_CODES.get(failure.code, "server_error")
    return {"code": code, "message": failure.message, "param": failure.param, "type": failure.code}


def response_object(shape: AnswerShape, echo: Echo, status: str, output: list[dict[str, Any]], **more: Any) -> bytes:
    """JSON. ``more``: ``usage``, ``error``, ``incomplete_details``, as far as there are any."""
    told = {
        "id": shape.response_id,
        "object": "response",
        "created_at": shape.created_s,
        "status": status,
        "model": shape.model,
        "output": output,
        "error": None,
        "incomplete_details": None,
        "usage": None,
        **more,
    }
    return _encode(told)[:-1] + b"," + bytes(echo.fields)[1:]
