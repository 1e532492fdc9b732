"""The turn writer: what is ready in one turn is one message, in order, within its bounds."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from shoal_contracts.errors import BadRequest, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_runtime.streams import BATCH_BYTES, TurnWriter, serve_stream
from shoal_testkit.clock import settle


class _Context:
    """The server's side of a call; ``gate`` closed: the client does not read."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def write(self, message: list[int]) -> None:
        await self.gate.wait()
        self.written.append(message)


class _Requests:
    """What a client sends, until ``None``."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int | None] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[int]:
        while (request := await self.queue.get()) is not None:
            yield request


def _writer(**options: object) -> TurnWriter[int]:
    return TurnWriter(lambda items: [list(items)], **options)  # type: ignore[arg-type]


async def test_one_turn_is_one_message_in_order() -> None:
    context, writer = _Context(), _writer()
    task = asyncio.ensure_future(writer.run(context.write))
    for item in range(5):
        writer.put(item)
    await settle()
    writer.put(5)
    await settle()
    assert context.written == [[0, 1, 2, 3, 4], [5]]
    writer.put(6)
    writer.close()
    await task
    assert context.written[-1] == [6]


async def test_items_pile_up_into_one_message_while_the_peer_does_not_read() -> None:
    context, writer = _Context(), _writer()
    task = asyncio.ensure_future(writer.run(context.write))
    context.gate.clear()
    for item in range(4):
        writer.put(item)
        await settle()
    context.gate.set()
    await settle()
    assert context.written == [[0], [1, 2, 3]]
    task.cancel()


async def test_a_batch_is_cut_before_it_outgrows_a_message() -> None:
    context, writer = _Context(), _writer(weigh=lambda item: item)
    task = asyncio.ensure_future(writer.run(context.write))
    big = BATCH_BYTES - 10
    for item in (5, big, 2 * BATCH_BYTES, 1, 2):
        writer.put(item)
    await settle()
    assert context.written == [[5, big], [2 * BATCH_BYTES], [1, 2]]
    task.cancel()


async def test_a_peer_that_never_reads_loses_its_stream() -> None:
    context, writer, requests = _Context(), _writer(max_items=3), _Requests()
    context.gate.clear()
    serving = asyncio.ensure_future(serve_stream(requests.__aiter__(), context, writer, lambda request: None))
    await settle()
    for item in range(6):
        writer.put(item)
    with pytest.raises(Unavailable):
        await serving


async def test_the_server_answers_and_ends_with_its_client() -> None:
    context, writer, requests = _Context(), _writer(), _Requests()
    serving = asyncio.ensure_future(
        serve_stream(requests.__aiter__(), context, writer, lambda request: writer.put(request * 2))
    )
    for request in (1, 2, None):
        requests.queue.put_nowait(request)
    await serving
    assert [item for message in context.written for item in message] == [2, 4]


async def test_a_request_that_is_refused_ends_the_stream_with_its_error() -> None:
    def refuse(request: int) -> None:
        raise BadRequest(pb.INVALID_REQUEST, "a stream id was used twice")

    requests = _Requests()
    requests.queue.put_nowait(1)
    with pytest.raises(BadRequest):
        await serve_stream(requests.__aiter__(), _Context(), _writer(), refuse)
