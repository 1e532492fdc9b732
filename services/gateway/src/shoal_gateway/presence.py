"""The client's end of a request: is it still there, what waits for it, and when something must be written.

One reader (``while_present``) sees the client leave, also while a non-streaming call computes. One writer per
streaming response takes everything that is ready and never waits for more; it writes the head with the first event
or after ``head_wait_s``, and comments while nothing comes. What waits for a slow client is bounded: ``put`` says no,
and that request alone is aborted. docs/decisions/0013-tokens-travel-in-batches.md
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass
from typing import Any

from shoal_contracts.errors import BadRequest, Bug, Interrupted, Refused, ShoalError
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.error_shapes import Header, error_event, error_response, id_headers
from shoal_gateway.request import Options
from shoal_runtime.tasks import done_before

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

KEEP_ALIVE = b": keep-alive\n\n"
EVENT_HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
BODY_RETRY_S = 5.0
FLUSH_S = 30.0  # for the last bytes of a response to a client that reads slowly


@dataclass(frozen=True, slots=True)
class PresenceLimits:
    """How long and how much a client may be waited for."""

    max_body_bytes: int
    body_wait_s: float
    head_wait_s: float
    keep_alive_s: float
    max_pending_bytes: int


class BodyRoom:
    """Bytes of all bodies that are here and not encoded yet, bounded: also of those that arrive slowly or wait."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.bytes = 0

    def take(self, count: int) -> None:
        """Raises Refused (OVERLOADED) when so many more are too many. What was taken must be given back."""
        if self.bytes + count > self._max_bytes:
            raise Refused(
                pb.OVERLOADED,
                "the bodies of waiting requests take too much memory; try again",
                retry_after_s=BODY_RETRY_S,
            )
        self.bytes += count

    def give_back(self, count: int) -> None:
        """These are held no more."""
        self.bytes -= count


class Outbox:
    """Bytes that wait for one client."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self.is_closed = False

    def put(self, piece: bytes, *, is_bounded: bool = True) -> bool:
        """False: it would be too much, and it was dropped."""
        if is_bounded and self._pieces and self._bytes + len(piece) > self._max_bytes:
            return False
        self._pieces.append(piece)
        self._bytes += len(piece)
        self._wake()
        return True

    def close(self) -> None:
        """Nothing more will be put."""
        self.is_closed = True
        self._wake()

    async def take(self, wait_s: float) -> bytes:
        """All that is there, as soon as something is; b"" after ``wait_s``, or when closed and empty."""
        if not self._pieces and not self.is_closed:
            # Once for each event of each stream: a bare timer costs a third of ``asyncio.timeout``.
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(wait_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        return self.take_now()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take_now(self) -> bytes:
        """All that is there."""
        taken = b"".join(self._pieces)
        self._pieces.clear()
        self._bytes = 0
        return taken


class ClientConnection:
    """One HTTP exchange. Made and used by its request's task; ``close`` is the last call."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        options: Options,
        limits: PresenceLimits,
        room: BodyRoom,
        disconnect: Callable[[], None],
    ) -> None:
        self._receive = receive
        self._send = send
        self._limits = limits
        self._room = room
        self._disconnect = disconnect
        self._options = options
        self._id_headers = id_headers(options.api, options.request_id)
        self._outbox = Outbox(limits.max_pending_bytes)
        self._writer: asyncio.Task[None] | None = None
        self._body = b""
        self._held_bytes = 0  # of the body, in the room
        self._has_ended = False
        self._has_overflowed = False
        self._sent_events = 0
        self.has_head = False
        self.has_left = False

    @property
    def body(self) -> bytes:
        """The body between ``read_body`` and ``release_body``."""
        return self._body

    async def read_body(self) -> None:
        """Take the whole body. REQUEST_TOO_LARGE as soon as it is over the limit; never holds more than that."""
        try:
            async with asyncio.timeout(self._limits.body_wait_s):
                await self._read_all()
        except TimeoutError:
            raise BadRequest(
                pb.INVALID_REQUEST, f"the body did not arrive within {self._limits.body_wait_s:g} s"
            ) from None

    async def _read_all(self) -> None:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.has_left = True
                raise Interrupted(pb.CANCELLED, "the client left")
            piece = message.get("body", b"")
            if len(body) + len(piece) > self._limits.max_body_bytes:
                raise too_large(self._limits.max_body_bytes)
            self._room.take(len(piece))
            self._held_bytes += len(piece)
            body += piece
            if not message.get("more_body", False):
                self._body = bytes(body)
                return

    def release_body(self) -> None:
        """Nobody reads the body, or the rest of it, any more. Idempotent."""
        self._room.give_back(self._held_bytes)
        self._held_bytes = 0
        self._body = b""

    async def while_present(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``; cancel it and raise Interrupted when the client leaves."""
        if not await done_before(work, self._wait_left()):
            raise Interrupted(pb.CANCELLED, "the client left")

    async def _wait_left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.has_left = True

    def begin_events(self) -> None:
        """The response is a stream of events: from now on the head may be written."""
        self._writer = asyncio.get_running_loop().create_task(self._write_events(), name="event_writer")

    def put(self, events: bytes, event_count: int = 0) -> bool:
        """Queue so many events, or a piece of the body. False: the client reads too slowly."""
        # A body that is written at its end waits for nobody; the messages that bring it are bounded.
        is_taken = self._outbox.put(events, is_bounded=self._writer is not None)
        self._has_overflowed |= not is_taken
        self._sent_events += event_count
        return is_taken

    async def end(self, receipt_json: bytes | None) -> None:
        """Write what is left. A streaming response has its receipt in the last event instead."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._writer is None:
            headers = [(b"x-shoal-receipt", receipt_json)] if receipt_json is not None else []
            await self._respond(200, self._outbox.take_now(), headers)
            return
        self._outbox.close()
        await self._finish_writer()

    async def fail(self, error: ShoalError) -> None:
        """Tell the client what went wrong, in the form that is still possible."""
        if self.has_left or self._has_ended:
            return
        self._has_ended = True
        if self._has_overflowed:
            self._disconnect()
            return
        if self._writer is not None and self.has_head:
            last = error_event(error, self._options.api, self._options.request_id, self._sent_events)
            self._outbox.put(last, is_bounded=False)
            self._outbox.close()
            await self._finish_writer()
            return
        self._stop_writer()
        status, body, headers = error_response(error, self._options.api, self._options.request_id)
        await self._respond(status, body, headers)

    async def _respond(self, status: int, body: bytes, headers: list[Header]) -> None:
        self.has_head = True
        fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        head = [*fixed, *self._id_headers, *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body})

    async def _write_events(self) -> None:
        limits, outbox = self._limits, self._outbox
        ready = await outbox.take(limits.head_wait_s)
        self.has_head = True
        await self._send({"type": "http.response.start", "status": 200, "headers": [*EVENT_HEADERS, *self._id_headers]})
        while True:
            ready += outbox.take_now()  # what came while the last write waited
            is_last = outbox.is_closed
            await self._send(
                {
                    "type": "http.response.body",
                    "body": ready if ready or is_last else KEEP_ALIVE,
                    "more_body": not is_last,
                }
            )
            if is_last:
                return
            ready = await outbox.take(limits.keep_alive_s)

    async def _finish_writer(self) -> None:
        assert self._writer is not None
        await asyncio.wait({self._writer}, timeout=FLUSH_S)
        if not self._writer.done():
            self._stop_writer()
            self._disconnect()
            raise Interrupted(pb.CANCELLED, "the client reads too slowly")
        if (crash := self._writer.exception()) is not None:
            raise Bug(pb.BUG, "an internal error; it was logged") from crash

    def close(self) -> None:
        """The exchange is over, whether or not anything could be written. Idempotent."""
        self.release_body()
        self._stop_writer()

    def _stop_writer(self) -> None:
        if self._writer is not None:
            self._writer.cancel()


def too_large(max_body_bytes: int) -> BadRequest:
    """The body is over the limit."""
    return BadRequest(pb.REQUEST_TOO_LARGE, f"the request body is over the limit of {max_body_bytes} bytes")
