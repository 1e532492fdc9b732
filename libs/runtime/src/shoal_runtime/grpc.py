"""gRPC the way every service uses it: limits, deadlines, typed errors, trace context, health.

A ShoalError raised by a handler becomes its status plus the trailer ``shoal-failure-bin``; any other exception is
a Bug: logged here with its traceback, told to the peer without any text of it. ``call`` turns every failed unary
call back into a ShoalError. Long-lived streams live in ``streams.py``.
docs/decisions/0001-nats-distributes-grpc-answers.md
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from shoal_contracts.errors import (
    ERRORS,
    FAILURE_TRAILER,
    BadRequest,
    Bug,
    Refused,
    ShoalError,
    Unavailable,
    from_failure,
    to_failure,
)
from shoal_contracts.v1 import common_pb2 as pb
from shoal_runtime import tracing
from shoal_runtime.health import Health
from shoal_runtime.logs import get_logger
from shoal_runtime.metrics import RPC_FAILURES

if TYPE_CHECKING:
    from shoal_runtime.process import Process

    Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]  # generic in its stub only

log = get_logger(__name__)

GRPC_MESSAGE_BYTES = 16 * 1024 * 1024
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 3_000
CONNECT_MS = 3_000
STOP_S = 1.0

_LIMITS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", GRPC_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", GRPC_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_OPTIONS = [
    *_LIMITS,
    ("grpc.so_reuseport", 0),  # two instances on one port must fail loudly, not share it
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
]
_CHANNEL_OPTIONS = [
    *_LIMITS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # in gRPC's words: the time that one attempt is given
    # A peer that restarts elsewhere under the same address must not inherit a broken connection of the pool.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # one that is set for the outside must not see what services say to each other
]

Reply = TypeVar("Reply")


def create_server(process: "Process") -> grpc.aio.Server:
    """A server with limits, the error border and the gRPC health service; add servicers, then ``serve`` it."""
    server = grpc.aio.server(interceptors=[_Border()], options=_SERVER_OPTIONS)
    servicer = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    process.tasks.spawn(lambda: _report_health(process.health, servicer), name="grpc_health", restart=True)
    return server


async def _report_health(health: Health, servicer: health_aio.HealthServicer) -> None:
    while True:
        changed = health.next_change()
        status = health_pb2.HealthCheckResponse
        await servicer.set("", status.SERVING if health.is_ready else status.NOT_SERVING)
        await changed


async def serve(process: "Process", server: grpc.aio.Server) -> str:
    """Listen on the settings' host and port until the process closes; returns the address peers can reach."""
    settings = process.settings
    port = server.add_insecure_port(f"{settings.host}:{settings.grpc_port}")
    await server.start()

    async def close() -> None:
        await server.stop(STOP_S)

    process.stack.push_async_callback(close)
    return f"{settings.reachable_host}:{port}"


def connect(address: str) -> grpc.aio.Channel:
    """A channel with limits and keepalive. It connects on first use; the caller closes it."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


async def call(method: Callable[..., Awaitable[Reply]], request: object, *, timeout_s: float) -> Reply:
    """One unary call with a deadline. Raises ShoalError; a deadline that passed is Unavailable (PEER_SILENT)."""
    try:
        return await method(request, timeout=timeout_s, metadata=call_metadata())
    except grpc.aio.AioRpcError as error:
        raise to_shoal_error(error) from error


def call_metadata() -> tuple[tuple[str, str], ...]:
    """What every outgoing call carries: the trace it belongs to."""
    carrier: dict[str, str] = {}
    tracing.inject(carrier)
    return tuple(carrier.items())


def to_shoal_error(error: grpc.aio.AioRpcError) -> ShoalError:
    """The typed error that a failed call means to its caller."""
    for key, value in error.trailing_metadata() or ():
        if key == FAILURE_TRAILER and isinstance(value, bytes):
            try:
                return from_failure(pb.Failure.FromString(value))
            except DecodeError:
                break
    status = error.code()
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unavailable(pb.PEER_SILENT, "a part of the system did not answer in time; try again")
    if status is grpc.StatusCode.CANCELLED:
        # By the peer, or by gRPC for it: whoever cancels a call itself sees a CancelledError instead.
        return Unavailable(pb.UNAVAILABLE, "a part of the system gave the call up; try again")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC's own: a message over the limit
        return BadRequest(pb.REQUEST_TOO_LARGE, f"the request is over the limit of {GRPC_MESSAGE_BYTES} bytes")
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return Bug(pb.BUG, "a peer does not know this call; versions do not fit")
    return Unavailable(pb.UNAVAILABLE, "a part of the system is not reachable; try again")


class _Border(grpc.aio.ServerInterceptor):
    """The request boundary of every RPC; the other place that may catch ``Exception``."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(details)
        if handler is None or details.method.startswith("/grpc.health."):
            return handler
        method = details.method.rsplit("/", 1)[-1]
        make, behaviour = _parts(handler)
        return make(
            _bordered(behaviour, method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _parts(handler: Any) -> tuple[Callable[..., "Handler"], Callable[..., Any]]:
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary


def _bordered(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(behaviour):

        async def generate(request: object, context: Any) -> AsyncIterator[Any]:
            _adopt_trace(context)
            try:
                async for reply in behaviour(request, context):
                    yield reply
            except Exception as error:
                await _abort(context, method, error)

        return generate

    async def answer(request: object, context: Any) -> Any:
        _adopt_trace(context)
        try:
            with tracing.start_span(method):
                return await behaviour(request, context)
        except Exception as error:
            await _abort(context, method, error)

    return answer


def _adopt_trace(context: Any) -> None:
    headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    if tracing.TRACEPARENT in headers:
        tracing.adopt(tracing.extract(headers))  # gRPC runs each call in a task of its own


async def _abort(context: Any, method: str, error: Exception) -> None:
    """End the call with the status of ``error``. Raises always."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, ShoalError):
        log.error("rpc.crashed", method=method, exc_info=error)
        error = Bug(pb.BUG, "an internal error; it was logged")
    elif isinstance(error, Bug):
        log.error("rpc.crashed", method=method, exc_info=error)
    RPC_FAILURES.labels(method, pb.ErrorCode.Name(error.code)).inc()
    trailer = ((FAILURE_TRAILER, to_failure(error).SerializeToString()),)
    await context.abort(ERRORS[error.code].grpc_status, error.message, trailer)


def draining() -> Refused:
    """What a server answers once it takes nothing new."""
    return Refused(pb.DRAINING, "this instance is leaving; another one will take the request", retry_after_s=1)
