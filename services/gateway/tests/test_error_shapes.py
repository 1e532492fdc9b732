"""Every error code has a status, and a body in OpenAI's shape that tells no secrets."""

import json

import pytest

from shoal_contracts.errors import ERRORS, Refused, from_failure
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.error_shapes import error_event, error_response

KNOWN = [code for code in pb.ErrorCode.values() if code != pb.ERROR_CODE_UNSPECIFIED]


@pytest.mark.parametrize("code", KNOWN, ids=pb.ErrorCode.Name)
def test_every_code_becomes_an_openai_error(code: pb.ErrorCode.ValueType) -> None:
    error = from_failure(pb.Failure(code=code, message="what to do", param="messages"))
    status, body, _ = error_response(error)
    told = json.loads(body)["error"]
    assert status == ERRORS[code].http_status
    assert set(told) == {"message", "type", "param", "code"}
    assert told["message"] == "what to do"
    assert (told["type"] == "invalid_request_error") == (400 <= status < 429)


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    _, _, headers = error_response(Refused(pb.OVERLOADED, "full", retry_after_s=0.2))
    assert headers == [(b"retry-after", b"1")]


def test_error_event_ends_the_stream() -> None:
    event = error_event(Refused(pb.OVERLOADED, "full"))
    assert event.startswith(b'data: {"error":')
    assert event.endswith(b"\n\ndata: [DONE]\n\n")
