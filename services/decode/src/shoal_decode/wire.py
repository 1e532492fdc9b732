"""Between protobuf and the dataclasses of the domain. Protobuf stops here.

A message that makes no sense is a BadRequest that names the field. docs/decisions/0013-tokens-travel-in-batches.md
"""

from collections.abc import Sequence

from shoal_contracts.errors import ERRORS, BadRequest, ShoalError, to_failure
from shoal_contracts.ids import pack_u32, unpack_u32
from shoal_contracts.v1 import common_pb2, decode_pb2
from shoal_contracts.v1 import common_pb2 as pb
from shoal_decode.acceptance import Refusal
from shoal_decode.token_stream import Outcome, Placement, StreamEnd
from shoal_engine.api import EngineRequest, TokenLogprobs
from shoal_engine.wire import to_items, to_sampling

_REFUSALS: dict[Refusal, tuple[pb.ErrorCode.ValueType, str]] = {
    Refusal.LEAVING: (pb.DRAINING, "this worker is leaving; another one will take the request"),
    Refusal.OTHER_POOL: (pb.POOL_MISMATCH, "this worker serves another pool"),
    Refusal.TOO_LONG: (pb.CONTEXT_LENGTH_EXCEEDED, "the prompt leaves no room for an answer in the model's context"),
    Refusal.TOO_MANY_REQUESTS: (pb.OVERLOADED, "this worker runs as many requests as it can"),
    Refusal.NO_ROOM: (pb.OVERLOADED, "this worker has no room for a prompt of this length now"),
    Refusal.NO_LOCAL_PREFILL: (pb.OVERLOADED, "this worker computes as many prompts as it may"),
}

_FINISHED = {
    Outcome.STOP: common_pb2.STOP,
    Outcome.LENGTH: common_pb2.LENGTH,
    Outcome.CANCELLED: common_pb2.CANCEL,
    Outcome.LOST: common_pb2.CANCEL,
}

_FAILURES: dict[Outcome, tuple[pb.ErrorCode.ValueType, str]] = {
    Outcome.BUDGET_SPENT: (pb.DEADLINE_EXCEEDED, "the time for this request is used up"),
    Outcome.UNREAD: (pb.OVERLOADED, "the answer was not read fast enough"),
    Outcome.LEAVING: (pb.DRAINING, "this worker is leaving; another one will go on"),
    Outcome.ENGINE_REFUSED: (pb.INVALID_REQUEST, "the model cannot run this request as it is"),
    Outcome.ENGINE_FAILED: (pb.ENGINE_FAILED, "the engine of this worker failed; another one may do it"),
    Outcome.CRASHED: (pb.BUG, "an internal error; it was logged"),
}

RETRY_AFTER_S = 0.5


def _error(code: pb.ErrorCode.ValueType, message: str, retry_after_s: float | None = None) -> ShoalError:
    return ERRORS[code].type(code, message, retry_after_s=retry_after_s)


def refusal_error(refusal: Refusal) -> ShoalError:
    """What a refused placement means to its gateway."""
    code, message = _REFUSALS[refusal]
    return _error(code, message, RETRY_AFTER_S if code == pb.OVERLOADED else None)


def end_error(end: StreamEnd) -> ShoalError | None:
    """The failure that an end is, or None."""
    if end.outcome in _FINISHED:
        return None
    code, message = _FAILURES[end.outcome]
    return _error(code, end.reason or message)


def finished(stream_id: int, end: StreamEnd) -> decode_pb2.Finished:
    """The wire form of a stream's end."""
    message = decode_pb2.Finished(
        stream_id=stream_id,
        reason=_FINISHED.get(end.outcome, common_pb2.FAILURE),
        completion_tokens=end.completion_tokens,
    )
    if (error := end_error(end)) is not None:
        message.failure.CopyFrom(to_failure(error))
    if end.stop_token_id is not None:
        message.stop_token_id = end.stop_token_id
    return message


def cancelled(message: decode_pb2.ServeRequest) -> Sequence[int]:
    """The stream numbers that a gateway cancels."""
    if len(message.cancel) % 4:
        raise _bad("cancel", "must be packed uint32")
    return unpack_u32(message.cancel)


def placement(message: decode_pb2.GenerateRequest) -> Placement:
    """What a gateway asks for. BadRequest when it cannot be meant."""
    for name in ("token_ids", "resumed_token_ids"):
        if len(getattr(message, name)) % 4:
            raise _bad(name, "must be packed uint32")
    if not message.token_ids:
        raise _bad("token_ids", "must not be empty")
    if not message.request_id:
        raise _bad("request_id", "must be set")
    if message.budget_ms == 0:
        raise _bad("budget_ms", "must be more than 0: no request runs without a deadline")
    request = EngineRequest(
        request_id=message.request_id,
        token_ids=unpack_u32(message.token_ids),
        sampling=to_sampling(message.sampling),
        cache_salt=message.cache_salt,
        items=to_items(message.items),
        resumed_token_ids=unpack_u32(message.resumed_token_ids),
    )
    return Placement(request, message.pool, message.is_local_prefill, message.budget_ms / 1000)


def logprobs(told: TokenLogprobs) -> common_pb2.TokenLogprobs:
    """The wire form of one token's log probabilities."""
    return common_pb2.TokenLogprobs(
        logprob=told.logprob,
        top_token_ids=pack_u32(token_id for token_id, _ in told.top),
        top_logprobs=[value for _, value in told.top],
    )


def _bad(param: str, message: str) -> BadRequest:
    return BadRequest(pb.INVALID_REQUEST, f"{param} {message}", param=param)
