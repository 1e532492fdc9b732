"""The gRPC edge: one connection a gateway (``Serve``) and one call a request (``Generate``), on the same internals.

A connection owns the stream numbers of its gateway. When it ends, in whatever way, everything still placed by it
is aborted, once. A gateway that breaks the protocol (a stream number used twice, a message that cannot be unpacked)
loses its connection; one bad placement is refused alone.
docs/decisions/0013-tokens-travel-in-batches.md
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from shoal_contracts.errors import BadRequest, ShoalError
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import decode_pb2, decode_pb2_grpc
from shoal_decode import metrics, wire
from shoal_decode.acceptance import Refusal
from shoal_decode.placements import Placements
from shoal_decode.token_stream import Outcome, Placement, StreamEnd, TokenStream
from shoal_decode.turns import Slot, generate_reply, serve_replies
from shoal_engine.api import Step
from shoal_runtime import tracing
from shoal_runtime.clock import Clock
from shoal_runtime.logs import get_logger
from shoal_runtime.streams import TurnWriter, serve_stream

log = get_logger(__name__)

# Place one request; the callable is called at its end. Raises what a refusal means.
Start = Callable[[decode_pb2.GenerateRequest, Slot, Callable[[], object]], TokenStream]


class _Counted:
    """A sink that counts and settles around a slot; one for each placed request."""

    __slots__ = ("_accepted_at_s", "_clock", "_hit_tokens", "_on_end", "_placement", "_slot")

    def __init__(self, slot: Slot, placement: Placement, clock: Clock, on_end: Callable[[], object]) -> None:
        self._slot = slot
        self._placement = placement
        self._clock = clock
        self._on_end = on_end
        self._accepted_at_s = clock.monotonic()
        self._hit_tokens: int | None = None

    def step(self, step: Step) -> bool:
        if step.hit_tokens is not None:
            self._hit_tokens = step.hit_tokens
            metrics.PROMPT_TOKENS.inc(self._placement.tokens)
            metrics.HIT_TOKENS.inc(step.hit_tokens)
            metrics.FIRST_TOKEN.observe(self._clock.monotonic() - self._accepted_at_s)
        return self._slot.step(step)

    def finished(self, end: StreamEnd) -> None:
        metrics.RUNNING.dec()
        metrics.STREAMS.labels(end.outcome.value).inc()
        self._on_end()
        log.info(
            "stream.settled",
            request_id=self._placement.request.request_id,
            outcome=end.outcome.value,
            prompt_tokens=self._placement.tokens,
            hit_tokens=self._hit_tokens,
            completion_tokens=end.completion_tokens,
            duration_ms=round(1000 * (self._clock.monotonic() - self._accepted_at_s)),
        )
        self._slot.finished(end)


def _nothing() -> None:
    return None


class _Connection:
    """The streams of one gateway. ``on_request`` runs in the reader, everything on one loop."""

    def __init__(self, start: Start, max_unread_tokens: int) -> None:
        self.writer = TurnWriter(serve_replies, weigh=Slot.weight_bytes)
        self.breach: BadRequest | None = None  # what the gateway did that ends the connection
        self._start = start
        self._max_unread_tokens = max_unread_tokens
        self._streams: dict[int, TokenStream] = {}

    def on_request(self, message: decode_pb2.ServeRequest) -> None:
        if self.breach is not None:
            return
        try:
            for place in message.place:
                self._place(place.stream_id, place.request)
            for stream_id in wire.cancelled(message):
                if stream_id in self._streams:
                    self._streams[stream_id].end(Outcome.CANCELLED)
        except BadRequest as breach:
            # Not raised here: a call cannot be ended with a status while a message is being written.
            self.breach = breach
            self.writer.close()

    def _place(self, stream_id: int, request: decode_pb2.GenerateRequest) -> None:
        if stream_id in self._streams:
            raise BadRequest(pb.INVALID_REQUEST, f"stream {stream_id} is in use on this connection", param="stream_id")
        slot = Slot(stream_id, self._max_unread_tokens, self.writer.put)
        try:
            self._streams[stream_id] = self._start(request, slot, lambda: self._streams.pop(stream_id, None))
        except ShoalError as error:
            slot.refuse(error)
            return
        slot.accept()

    def lose(self) -> None:
        """Abort everything that still runs for this connection."""
        for stream in list(self._streams.values()):
            stream.end(Outcome.LOST)


class DecodeApi(decode_pb2_grpc.DecodeServicer):
    """Handlers run on the loop of the process."""

    def __init__(self, placements: Placements, clock: Clock, max_unread_tokens: int) -> None:
        self._placements = placements
        self._clock = clock
        self._max_unread_tokens = max_unread_tokens
        self._connections: set[_Connection] = set()

    async def Serve(self, request_iterator: AsyncIterator[decode_pb2.ServeRequest], context: Any) -> None:  # type: ignore[override]
        connection = _Connection(self._start, self._max_unread_tokens)
        self._connections.add(connection)
        try:
            await serve_stream(request_iterator, context, connection.writer, connection.on_request)
            if connection.breach is not None:
                raise connection.breach
        finally:
            self._connections.discard(connection)
            connection.lose()

    def _start(self, request: decode_pb2.GenerateRequest, slot: Slot, on_end: Callable[[], object]) -> TokenStream:
        """Place one request. Raises what a refusal means."""
        try:
            placement = wire.placement(request)
        except BadRequest:
            metrics.PLACEMENTS.labels("invalid").inc()
            raise
        sink = _Counted(slot, placement, self._clock, on_end)
        carrier = {tracing.TRACEPARENT: request.traceparent}
        trace = tracing.extract(carrier) if request.HasField("traceparent") else None
        with tracing.start_span("decode.place", trace, request_id=request.request_id):
            placed = self._placements.place(placement, sink)  # its task inherits the trace
        if isinstance(placed, Refusal):
            metrics.PLACEMENTS.labels(placed.value).inc()
            raise wire.refusal_error(placed)
        metrics.PLACEMENTS.labels("accepted").inc()
        metrics.RUNNING.inc()
        return placed

    async def Generate(self, request: decode_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        # Writes by itself instead of yielding: a cancelled call then ends in the finally below at once.
        news = asyncio.Event()
        slot = Slot(0, self._max_unread_tokens, lambda _: news.set())
        stream = self._start(request, slot, _nothing)
        try:
            end: StreamEnd | None = None
            while end is None:
                await news.wait()
                news.clear()
                end = slot.end
                if end is not None and (error := wire.end_error(end)) is not None:
                    raise error
                await context.write(generate_reply(slot))
        finally:
            stream.end(Outcome.LOST)

    async def close(self) -> None:
        """Write what waits and end every connection in order, so that gateways see an end and not a break."""
        for connection in self._connections:
            connection.writer.close()
