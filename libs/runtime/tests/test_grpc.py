"""What a failed call means to its caller."""

import grpc
import pytest

from shoal_contracts.errors import FAILURE_TRAILER, BadRequest, Bug, Refused, ShoalError, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_runtime.grpc import to_shoal_error


def _failed(status: grpc.StatusCode, *trailer: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), "peer text")


def test_the_trailer_is_the_error() -> None:
    failure = pb.Failure(code=pb.OVERLOADED, message="full", retry_after_ms=1500)
    error = to_shoal_error(_failed(grpc.StatusCode.UNAVAILABLE, (FAILURE_TRAILER, failure.SerializeToString())))
    assert isinstance(error, Refused)
    assert (error.code, error.message, error.retry_after_s) == (pb.OVERLOADED, "full", 1.5)


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, Unavailable, pb.PEER_SILENT),
        (grpc.StatusCode.UNAVAILABLE, Unavailable, pb.UNAVAILABLE),
        (grpc.StatusCode.INTERNAL, Unavailable, pb.UNAVAILABLE),
        (grpc.StatusCode.CANCELLED, Unavailable, pb.UNAVAILABLE),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, BadRequest, pb.REQUEST_TOO_LARGE),
        (grpc.StatusCode.UNIMPLEMENTED, Bug, pb.BUG),
    ],
)
def test_a_status_without_trailer_is_typed_and_the_peers_text_stays_out(
    status: grpc.StatusCode, kind: type[ShoalError], code: pb.ErrorCode.ValueType
) -> None:
    error = to_shoal_error(_failed(status))
    assert type(error) is kind and error.code == code
    assert "peer text" not in error.message


def test_a_trailer_that_does_not_parse_is_not_trusted() -> None:
    error = to_shoal_error(_failed(grpc.StatusCode.UNAVAILABLE, (FAILURE_TRAILER, b"\xff\xff")))
    assert error.code == pb.UNAVAILABLE
