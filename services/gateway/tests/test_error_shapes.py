"""Every error code has a status, and a body in the shape of the API that tells no secrets."""

import json
from typing import Any

import pytest

from shoal_contracts.errors import ERRORS, BadRequest, Refused, ShoalError, Unavailable, from_failure
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.error_shapes import api_of, error_event, error_response
from shoal_gateway.request import Api

KNOWN = [code for code in pb.ErrorCode.values() if code != pb.ERROR_CODE_UNSPECIFIED]
FULL = Refused(pb.OVERLOADED, "full")


@pytest.mark.parametrize("code", KNOWN, ids=pb.ErrorCode.Name)
@pytest.mark.parametrize("api", [Api.CHAT_COMPLETIONS, Api.COMPLETIONS, Api.RESPONSES])
def test_every_code_becomes_an_openai_error(code: pb.ErrorCode.ValueType, api: Api) -> None:
    error = from_failure(pb.Failure(code=code, message="what to do", param="messages"))
    status, body, _ = error_response(error, api, "r1")
    told = json.loads(body)["error"]
    assert status == ERRORS[code].http_status
    assert set(told) == {"message", "type", "param", "code"}
    assert told["message"] == "what to do"
    assert (told["type"] == "invalid_request_error") == (400 <= status < 429)


@pytest.mark.parametrize("code", KNOWN, ids=pb.ErrorCode.Name)
def test_every_code_becomes_an_anthropic_error(code: pb.ErrorCode.ValueType) -> None:
    error = from_failure(pb.Failure(code=code, message="what to do", param="messages[0]"))
    status, body, _ = error_response(error, Api.MESSAGES, "r1")
    told = json.loads(body)
    assert status == ERRORS[code].http_status
    assert (told["type"], told["request_id"], set(told["error"])) == ("error", "r1", {"type", "message"})
    assert told["error"]["message"] == "messages[0]: what to do"
    usual = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    usual |= {405: "invalid_request_error", 504: "timeout_error", 499: "timeout_error", 500: "api_error"}
    assert told["error"]["type"] == usual.get(status, "overloaded_error" if isinstance(error, Refused) else "api_error")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadRequest(pb.NOT_FOUND, "gone", param="previous_response_id"), "previous_response_not_found"),
        (BadRequest(pb.NOT_FOUND, "gone"), "not_found"),
        (BadRequest(pb.CONTEXT_LENGTH_EXCEEDED, "long"), "context_length_exceeded"),
        (Unavailable(pb.PEER_SILENT, "silent"), "peer_silent"),
    ],
)
def test_openais_own_codes_are_used_where_it_has_some(error: ShoalError, code: str) -> None:
    _, body, _ = error_response(error, Api.RESPONSES)
    assert json.loads(body)["error"]["code"] == code


def test_a_field_that_the_message_names_is_not_named_twice() -> None:
    _, body, _ = error_response(BadRequest(pb.INVALID_REQUEST, "'model' is missing", param="model"), Api.MESSAGES)
    assert json.loads(body)["error"]["message"] == "'model' is missing"


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    _, _, headers = error_response(Refused(pb.OVERLOADED, "full", retry_after_s=0.2))
    assert headers == [(b"retry-after", b"1")]


@pytest.mark.parametrize("api", [Api.CHAT_COMPLETIONS, Api.COMPLETIONS])
def test_error_event_of_chats_ends_the_stream(api: Api) -> None:
    event = error_event(FULL, api, "r1", 3)
    assert event.startswith(b'data: {"error":')
    assert event.endswith(b"\n\ndata: [DONE]\n\n")


def read_event(event: bytes) -> dict[str, Any]:
    name, data, *rest = event.decode().split("\n")
    assert (name, rest) == ("event: error", ["", ""])
    told: dict[str, Any] = json.loads(data.removeprefix("data: "))
    return told


def test_error_events_of_the_others_are_named() -> None:
    assert read_event(error_event(FULL, Api.RESPONSES, "r1", 3)) == {
        "type": "error",
        "code": "overloaded",
        "message": "full",
        "param": None,
        "sequence_number": 3,
    }
    assert read_event(error_event(FULL, Api.MESSAGES, "r1", 3)) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "full"},
        "request_id": "r1",
    }


@pytest.mark.parametrize(
    ("path", "is_anthropic", "api"),
    [
        ("/v1/messages", False, Api.MESSAGES),
        ("/v1/messages/count_tokens", False, Api.MESSAGES),
        ("/v1/messagesx", False, Api.CHAT_COMPLETIONS),
        ("/v1/responses/resp_1/cancel", False, Api.RESPONSES),
        ("/v1/completions", False, Api.COMPLETIONS),
        ("/v1/models/a/b", True, Api.MESSAGES),
        ("/v1/models/a/b", False, Api.CHAT_COMPLETIONS),
        ("/v1/chat/completions", True, Api.CHAT_COMPLETIONS),
        ("/anything", False, Api.CHAT_COMPLETIONS),
    ],
)
def test_a_path_belongs_to_an_api(path: str, is_anthropic: bool, api: Api) -> None:
    assert api_of(path, is_anthropic=is_anthropic) is api
