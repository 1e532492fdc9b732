"""Error bodies in the shape of the API that was called; the one thing the gateway knows about API shapes.

The tokenizer owns every grammar, but it may be what failed. Chat Completions and everything outside the three APIs
get OpenAI's shape. docs/decisions/0020-error-bodies-in-the-gateway.md
"""

import json
import math

from shoal_contracts.errors import ERRORS, BadRequest, Interrupted, Refused, ShoalError
from shoal_contracts.v1 import common_pb2 as pb

_CODES = {
    pb.CONTEXT_LENGTH_EXCEEDED: "context_length_exceeded",
    pb.MODEL_NOT_FOUND: "model_not_found",
    pb.RATE_LIMITED: "rate_limit_exceeded",
}


def error_body(error: ShoalError) -> bytes:
    """OpenAI's error object."""
    body = {
        "message": error.message,
        "type": _type(error),
        "param": error.param,
        "code": _CODES.get(error.code, pb.ErrorCode.Name(error.code).lower()),
    }
    return json.dumps({"error": body}, separators=(",", ":")).encode()


def error_event(error: ShoalError) -> bytes:
    """The last events of a stream whose head was already sent."""
    return b"data: " + error_body(error) + b"\n\ndata: [DONE]\n\n"


def error_response(error: ShoalError) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
    """Status, body and the headers that the error asks for."""
    headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    return ERRORS[error.code].http_status, error_body(error), headers


def _type(error: ShoalError) -> str:
    if isinstance(error, BadRequest):
        return "invalid_request_error"
    if error.code == pb.RATE_LIMITED:
        return "rate_limit_error"
    if isinstance(error, Refused):
        return "overloaded_error"
    return "timeout_error" if isinstance(error, Interrupted) else "server_error"
