"""Long-lived bidirectional gRPC streams that carry one message per turn of the loop.

Cost is paid per turn, not per token: what is put into a ``TurnWriter`` while the loop turns leaves as one message.
On each side there is one reader that is never cancelled and one writer task, because a timeout around a read or a
write cancels the whole RPC and two concurrent writes fail. A stream does not come back by itself: ``on_lost`` tells
its owner once, and the owner opens another one and places its requests again.
docs/decisions/0013-tokens-travel-in-batches.md
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar, cast

import grpc.aio

from shoal_contracts.errors import Bug, ShoalError, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_runtime.grpc import GRPC_MESSAGE_BYTES, call_metadata, to_shoal_error
from shoal_runtime.logs import get_logger
from shoal_runtime.metrics import STREAMS_LOST

log = get_logger(__name__)

MAX_WAITING_ITEMS = 100_000
BATCH_BYTES = GRPC_MESSAGE_BYTES // 2  # leaves room for one item that is heavier than the rest

Item = TypeVar("Item")
Request = TypeVar("Request")
Reply = TypeVar("Reply")


class TurnWriter(Generic[Item]):
    """Collects items and writes what is there once per turn of the loop, in order.

    ``build`` makes the messages of one batch; it decides the order inside. ``weigh`` (bytes of an item) cuts a batch
    before it outgrows a gRPC message; without it items must be small. Nothing is written before ``run`` runs.
    """

    def __init__(
        self,
        build: Callable[[Sequence[Item]], Iterable[Any]],
        *,
        weigh: Callable[[Item], int] | None = None,
        max_items: int = MAX_WAITING_ITEMS,
    ) -> None:
        self._build = build
        self._weigh = weigh
        self._max_items = max_items
        self._waiting: deque[Item] = deque()
        self._wakeup = asyncio.Event()
        self._is_closing = False
        # Done when the bound was reached: the peer has not read for so long that the stream is of no use any more.
        self.full: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: Item) -> None:
        """Queue ``item``; never blocks. At the bound the item is dropped and ``full`` ends the stream."""
        if len(self._waiting) < self._max_items:
            self._waiting.append(item)
            self._wakeup.set()
        elif not self.full.done():
            self.full.set_result(None)

    def close(self) -> None:
        """``run`` writes what waits and returns."""
        self._is_closing = True
        self._wakeup.set()

    async def run(self, write: Callable[[Any], Awaitable[None]]) -> None:
        """The writer task: the only caller of ``write``. While a write waits for the peer, items pile up."""
        while True:
            await self._wakeup.wait()
            await asyncio.sleep(0)  # let everyone else who is ready in this turn put theirs
            self._wakeup.clear()
            while self._waiting:
                for message in self._build(self._take()):
                    await write(message)
            if self._is_closing:
                return

    def _take(self) -> list[Item]:
        if self._weigh is None:
            batch = list(self._waiting)
            self._waiting.clear()
            return batch
        batch = [self._waiting.popleft()]
        weight = self._weigh(batch[0])
        while self._waiting and (weight := weight + self._weigh(self._waiting[0])) <= BATCH_BYTES:
            batch.append(self._waiting.popleft())
        return batch


class DuplexStream(Generic[Item, Reply]):
    """The client's end of one stream: open, ``send``, and either ``close`` or ``on_lost``, never both.

    A peer that stands still keeps its connection: whoever knows that it does ends the stream by ``give_up``.

    ``on_reply`` runs in the reader for each message, in order; it must not block. ``on_lost`` runs once, when the
    stream ended without ``close``: error, end by the server, or a full writer. After it nothing is called any more.
    """

    def __init__(
        self,
        method: Callable[..., grpc.aio.StreamStreamCall[Any, Reply]],
        writer: TurnWriter[Item],
        *,
        on_reply: Callable[[Reply], None],
        on_lost: Callable[[ShoalError], None],
    ) -> None:
        self._writer = writer
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._is_over = False
        self._call = method(metadata=call_metadata())
        writer.full.add_done_callback(lambda _: self._lose(not_reading()))
        loop = asyncio.get_running_loop()
        self._reader_task = loop.create_task(self._read(), name="stream_reader")
        self._writer_task = loop.create_task(self._write(), name="stream_writer")

    @property
    def is_open(self) -> bool:
        return not self._is_over

    def send(self, item: Item) -> None:
        """Queue ``item`` for the next turn. Dropped when the stream is over: ``on_lost`` told about it."""
        if not self._is_over:
            self._writer.put(item)

    def give_up(self, error: ShoalError) -> None:
        """End the stream as if it had broken: ``on_lost`` is told ``error``. Nothing when it is over."""
        self._lose(error)

    async def close(self) -> None:
        """End the stream from our side and wait for its tasks. Idempotent."""
        self._is_over = True
        self._call.cancel()
        self._writer_task.cancel()
        await asyncio.wait([self._reader_task, self._writer_task])

    async def _read(self) -> None:
        try:
            while (reply := await self._call.read()) is not grpc.aio.EOF:
                self._on_reply(cast(Reply, reply))
            error: ShoalError = Unavailable(pb.UNAVAILABLE, "a part of the system ended the connection; try again")
        except grpc.aio.AioRpcError as failed:
            error = to_shoal_error(failed)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            error = Unavailable(pb.UNAVAILABLE, "the connection was closed; try again")
        except Exception as crashed:
            error = _crashed("reader", crashed)
        self._lose(error)

    async def _write(self) -> None:
        try:
            await self._writer.run(self._call.write)
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            return  # the reader sees the end of the call and tells it
        except Exception as crashed:
            self._lose(_crashed("writer", crashed))

    def _lose(self, error: ShoalError) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._call.cancel()
        self._writer_task.cancel()
        STREAMS_LOST.labels(pb.ErrorCode.Name(error.code)).inc()
        self._on_lost(error)


def _is_cancelled() -> bool:
    """Whether this task was cancelled, as against a call that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _crashed(part: str, error: Exception) -> Bug:
    log.error("stream.crashed", part=part, exc_info=error)
    return Bug(pb.BUG, "an internal error; it was logged")


async def serve_stream(
    requests: AsyncIterator[Request],
    context: Any,
    writer: TurnWriter[Item],
    on_request: Callable[[Request], None],
) -> None:
    """The server's end of one stream, the body of a bidi handler. Returns when the client closed its side.

    ``on_request`` must not block. Leaves by CancelledError when the connection broke and by ShoalError when the
    client does not read or sent what ``on_request`` refused. The handler aborts in its ``finally`` what is still
    running for this stream.
    """
    loop = asyncio.get_running_loop()
    reading = loop.create_task(_read_all(requests, on_request), name="stream_reader")
    writing = loop.create_task(_write_all(writer, context), name="stream_writer")
    try:
        await asyncio.wait([reading, writing, writer.full], return_when=asyncio.FIRST_COMPLETED)
        if writer.full.done():
            raise not_reading()
        if reading.done():
            await reading
            writer.close()
        await writing
    finally:
        reading.cancel()
        writing.cancel()
        await asyncio.wait([reading, writing])


async def _read_all(requests: AsyncIterator[Request], on_request: Callable[[Request], None]) -> None:
    async for request in requests:
        on_request(request)


async def _write_all(writer: TurnWriter[Item], context: Any) -> None:
    # gRPC refuses to write once the client has left: that is an end like any other.
    with contextlib.suppress(grpc.aio.BaseError):
        await writer.run(context.write)


def not_reading() -> Unavailable:
    """The peer lets messages pile up beyond the bound."""
    return Unavailable(pb.PEER_SILENT, "a part of the system does not read any more; try again")
