"""The error tree and the one table that says what each error code means on every edge.

    ShoalError(code, message, retry_after_s, param)
    ├─ BadRequest     the caller must change something           4xx, never retried
    ├─ Refused        we chose not to take it now                429 / 503 + Retry-After
    ├─ Unavailable    a peer failed, was silent or lost a lease  retried elsewhere within the budget, then 503
    ├─ Interrupted    stopped on purpose                         499 / 504, not an error in dashboards
    ├─ CacheFault     stored KV gone, corrupt or fenced          never leaves the worker
    └─ Bug            an invariant broke                         500, traceback, alert

Raise at the edge that knows; catch only where something different happens next. A message is written for
the person who called the API: what to do next, no prompt text, no ``repr`` of an exception.
docs/decisions/0015-nothing-falls-back-in-silence.md
"""

from dataclasses import dataclass
from typing import ClassVar

import grpc

from shoal_contracts.v1 import common_pb2 as pb

FAILURE_TRAILER = "shoal-failure-bin"


class ShoalError(Exception):
    """Base of every error that may cross a process border; see the tree above."""

    code: pb.ErrorCode.ValueType

    def __init__(
        self,
        code: pb.ErrorCode.ValueType,
        message: str,
        *,
        retry_after_s: float | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        if not isinstance(self, ERRORS[code].type):
            raise ValueError(f"{pb.ErrorCode.Name(code)} is not a code of {type(self).__name__}")
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.param = param


class BadRequest(ShoalError):
    """The caller must change something; never retried."""


class Refused(ShoalError):
    """We chose not to take it now; come again after ``retry_after_s``."""


class Unavailable(ShoalError):
    """A peer failed, was silent or lost a lease; another one may do it."""


class Interrupted(ShoalError):
    """Stopped on purpose: the client left, or the request's budget is spent."""


class CacheFault(ShoalError):
    """Stored KV is gone, corrupt or fenced; the worker computes instead and counts."""


class Bug(ShoalError):
    """An invariant broke."""


@dataclass(frozen=True, slots=True)
class ErrorMeaning:
    """What one code means: its branch of the tree, the status on each edge, whether a retry elsewhere may help."""

    type: type[ShoalError]
    http_status: int
    grpc_status: grpc.StatusCode
    is_retried: bool

    CLIENT_CLOSED_REQUEST: ClassVar[int] = 499


_S = grpc.StatusCode
ERRORS: dict[pb.ErrorCode.ValueType, ErrorMeaning] = {
    pb.INVALID_REQUEST: ErrorMeaning(BadRequest, 400, _S.INVALID_ARGUMENT, False),
    pb.MODEL_NOT_FOUND: ErrorMeaning(BadRequest, 404, _S.NOT_FOUND, False),
    pb.CONTEXT_LENGTH_EXCEEDED: ErrorMeaning(BadRequest, 400, _S.OUT_OF_RANGE, False),
    pb.REQUEST_TOO_LARGE: ErrorMeaning(BadRequest, 413, _S.OUT_OF_RANGE, False),
    pb.UNSUPPORTED: ErrorMeaning(BadRequest, 400, _S.UNIMPLEMENTED, False),
    pb.NOT_FOUND: ErrorMeaning(BadRequest, 404, _S.NOT_FOUND, False),
    pb.METHOD_NOT_ALLOWED: ErrorMeaning(BadRequest, 405, _S.UNIMPLEMENTED, False),
    pb.RATE_LIMITED: ErrorMeaning(Refused, 429, _S.RESOURCE_EXHAUSTED, False),
    pb.OVERLOADED: ErrorMeaning(Refused, 503, _S.RESOURCE_EXHAUSTED, True),
    pb.DRAINING: ErrorMeaning(Refused, 503, _S.UNAVAILABLE, True),
    pb.UNAVAILABLE: ErrorMeaning(Unavailable, 503, _S.UNAVAILABLE, True),
    pb.PEER_SILENT: ErrorMeaning(Unavailable, 503, _S.UNAVAILABLE, True),
    pb.ENGINE_FAILED: ErrorMeaning(Unavailable, 503, _S.ABORTED, True),
    pb.TOO_MANY_DELIVERIES: ErrorMeaning(Unavailable, 503, _S.ABORTED, False),
    pb.POOL_MISMATCH: ErrorMeaning(Unavailable, 503, _S.FAILED_PRECONDITION, True),
    pb.CANCELLED: ErrorMeaning(Interrupted, ErrorMeaning.CLIENT_CLOSED_REQUEST, _S.CANCELLED, False),
    pb.DEADLINE_EXCEEDED: ErrorMeaning(Interrupted, 504, _S.DEADLINE_EXCEEDED, False),
    pb.CACHE_FAULT: ErrorMeaning(CacheFault, 500, _S.DATA_LOSS, False),
    pb.BUG: ErrorMeaning(Bug, 500, _S.INTERNAL, False),
}


def to_failure(error: ShoalError) -> pb.Failure:
    """The wire form of an error."""
    failure = pb.Failure(code=error.code, message=error.message)
    if error.retry_after_s is not None:
        failure.retry_after_ms = round(error.retry_after_s * 1000)
    if error.param is not None:
        failure.param = error.param
    return failure


def from_failure(failure: pb.Failure) -> ShoalError:
    """The error that a peer told. A code newer than this build becomes a Bug, so that it is seen."""
    meaning = ERRORS.get(failure.code)
    if meaning is None:
        return Bug(pb.BUG, f"a peer answered with error code {failure.code}, which this version does not know")
    return meaning.type(
        failure.code,
        failure.message,
        retry_after_s=failure.retry_after_ms / 1000 if failure.HasField("retry_after_ms") else None,
        param=failure.param if failure.HasField("param") else None,
    )
