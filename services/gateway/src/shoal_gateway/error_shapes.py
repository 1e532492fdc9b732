"""Error bodies in the shape of the API that was called; the one thing the gateway knows about API shapes.

The tokenizer owns every grammar, but it may be what failed. Messages gets Anthropic's shape, everything else OpenAI's.
The HTTP status is the same for all: where Anthropic has 529 for an overload we say 503, as to everybody, which its SDK
retries just so. docs/decisions/0020-error-bodies-in-the-gateway.md
"""

import json
import math
from typing import Any

from shoal_contracts.errors import ERRORS, BadRequest, Interrupted, Refused, ShoalError
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.request import Api

Header = tuple[bytes, bytes]

_CODES = {
    pb.CONTEXT_LENGTH_EXCEEDED: "context_length_exceeded",
    pb.MODEL_NOT_FOUND: "model_not_found",
    pb.RATE_LIMITED: "rate_limit_exceeded",
}
_ANTHROPIC_TYPES = {
    pb.MODEL_NOT_FOUND: "not_found_error",
    pb.NOT_FOUND: "not_found_error",
    pb.REQUEST_TOO_LARGE: "request_too_large",
    pb.RATE_LIMITED: "rate_limit_error",
}


def api_of(path: str, *, is_anthropic: bool = False) -> Api:
    """Whose shape answers under this path. Models have both: ``is_anthropic`` tells what their caller speaks."""
    if is_anthropic and (path == "/v1/models" or path.startswith("/v1/models/")):
        return Api.MESSAGES
    for api in Api:
        if path == api.value or path.startswith(f"{api.value}/"):
            return api
    return Api.CHAT_COMPLETIONS


def id_headers(api: Api, request_id: str) -> list[Header]:
    """Which request this is, under the names that clients of the API read."""
    headers = [(b"x-request-id", request_id.encode())]
    return [*headers, (b"request-id", request_id.encode())] if api is Api.MESSAGES else headers


def error_response(
    error: ShoalError, api: Api = Api.CHAT_COMPLETIONS, request_id: str = ""
) -> tuple[int, bytes, list[Header]]:
    """Status, body and the headers that the error asks for."""
    headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    body = _anthropic_error(error, request_id) if api is Api.MESSAGES else {"error": _openai_error(error)}
    return ERRORS[error.code].http_status, _to_json(body), headers


def error_event(error: ShoalError, api: Api, request_id: str, sent_events: int) -> bytes:
    """The last events of a stream whose head was already sent, after ``sent_events`` others."""
    if api is Api.MESSAGES:
        return b"event: error\ndata: " + _to_json(_anthropic_error(error, request_id)) + b"\n\n"
    told = _openai_error(error)
    if api is Api.RESPONSES:
        del told["type"]
        event = {"type": "error", **told, "sequence_number": sent_events}
        return b"event: error\ndata: " + _to_json(event) + b"\n\n"
    return b"data: " + _to_json({"error": told}) + b"\n\ndata: [DONE]\n\n"


def _openai_error(error: ShoalError) -> dict[str, Any]:
    code = _CODES.get(error.code, pb.ErrorCode.Name(error.code).lower())
    if error.code == pb.NOT_FOUND and error.param == "previous_response_id":
        code = "previous_response_not_found"
    return {"message": error.message, "type": _openai_type(error), "param": error.param, "code": code}


def _openai_type(error: ShoalError) -> str:
    if isinstance(error, BadRequest):
        return "invalid_request_error"
    if error.code == pb.RATE_LIMITED:
        return "rate_limit_error"
    if isinstance(error, Refused):
        return "overloaded_error"
    return "timeout_error" if isinstance(error, Interrupted) else "server_error"


def _anthropic_error(error: ShoalError, request_id: str) -> dict[str, Any]:
    told = {"type": _anthropic_type(error), "message": _with_param(error)}
    return {"type": "error", "error": told, "request_id": request_id or None}


def _anthropic_type(error: ShoalError) -> str:
    if error.code in _ANTHROPIC_TYPES:
        return _ANTHROPIC_TYPES[error.code]
    if isinstance(error, BadRequest):
        return "invalid_request_error"
    if isinstance(error, Refused):
        return "overloaded_error"
    return "timeout_error" if isinstance(error, Interrupted) else "api_error"


def _with_param(error: ShoalError) -> str:
    """The shape has no place for the field at fault but the message."""
    if error.param is None or error.param in error.message:
        return error.message
    return f"{error.param}: {error.message}"


def _to_json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
