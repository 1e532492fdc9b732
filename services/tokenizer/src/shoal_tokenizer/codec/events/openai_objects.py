"""Objects that OpenAI's APIs show alike, and the framing of the streams of Chat Completions and Completions."""

from collections.abc import Sequence
from typing import Any

import msgspec

from shoal_tokenizer.codec.api import AnswerEnd, ShownFailure, ShownToken, Usage

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0  # JSON has no infinity: OpenAI writes this for an impossible token


def shown_logprob(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def show_logprobs(tokens: Sequence[ShownToken]) -> list[dict[str, Any]]:
    """As Chat Completions and Responses have them."""
    return [
        {**_token(token.spelling, token.logprob), "top_logprobs": [_token(*entry) for entry in token.top]}
        for token in tokens
    ]


def _token(spelling: bytes, logprob: float) -> dict[str, Any]:
    return {"token": spelling.decode(errors="replace"), "logprob": shown_logprob(logprob), "bytes": list(spelling)}


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's counts, and DeepSeek's beside them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.hit_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "prompt_cache_hit_tokens": usage.hit_tokens,
        "prompt_cache_miss_tokens": usage.prompt_tokens - usage.hit_tokens,
    }


class _KeptChoice(msgspec.Struct, array_like=True):
    """What the first of several choices is told of another one."""

    choice: msgspec.Raw  # null in streams: the client has it
    completion_tokens: int
    reasoning_tokens: int


_read_kept = msgspec.json.Decoder(_KeptChoice).decode


def keep_choice(choice: dict[str, Any] | None, usage: Usage) -> bytes:
    """A choice that is not the first, for ``AnswerEnd.other_choices``."""
    return encode(_KeptChoice(msgspec.Raw(encode(choice)), usage.completion_tokens, usage.reasoning_tokens))


def sum_up(first: dict[str, Any] | None, end: AnswerEnd) -> tuple[list[Any], Usage]:
    """All choices in order, and the usage of the request: one prompt, and the sum of what was generated."""
    kept = [_read_kept(choice) for choice in end.other_choices]
    usage = Usage(
        end.usage.prompt_tokens,
        end.usage.hit_tokens,
        end.usage.completion_tokens + sum(choice.completion_tokens for choice in kept),
        end.usage.reasoning_tokens + sum(choice.reasoning_tokens for choice in kept),
    )
    return [first, *(choice.choice for choice in kept)], usage


def error_object(failure: ShownFailure, receipt_json: bytes | None) -> bytes:
    """What a body is instead of an answer, or the last event of a stream that failed."""
    error = {
        "message": failure.message,
        "type": "invalid_request_error" if failure.is_callers else "server_error",
        "param": failure.param,
        "code": failure.code,
    }
    return with_receipt(encode({"error": error}), receipt_json)


def with_receipt(encoded: bytes, receipt_json: bytes | None) -> bytes:
    """The route receipt as the last field of an encoded object that is not empty."""
    return encoded if receipt_json is None else encoded[:-1] + b',"shoal_receipt":' + receipt_json + b"}"


def event(encoded: bytes) -> bytes:
    return b"data: " + encoded + b"\n\n"
