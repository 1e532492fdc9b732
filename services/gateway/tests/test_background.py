"""Responses that are generated while nobody waits: their client, and who owns them."""

import asyncio
import contextlib
from typing import Any, cast

import pytest

from shoal_contracts.errors import Interrupted, Refused, ShoalError, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.background import BackgroundClient, BackgroundRuns
from shoal_runtime.health import Health
from shoal_runtime.tasks import Tasks
from shoal_testkit import settle

KEY = ("", "resp_1")


class Reader:
    """A client with so much room."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.events: list[bytes] = []

    def put(self, events: bytes, event_count: int = 0) -> bool:
        if len(self.events) >= self.room:
            return False
        self.events.append(events)
        return True


def a_client(reader: Reader | None = None) -> BackgroundClient:
    return BackgroundClient(cast(Any, reader))


async def test_work_goes_on_without_a_reader_and_ends_when_it_is_cancelled() -> None:
    client, ends = a_client(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("end")

    running = asyncio.create_task(client.while_present(work()))
    await settle()
    assert client.put(b"events", 1)
    assert not running.done()
    client.cancel()
    with pytest.raises(Interrupted) as cancelled:
        await running
    assert cancelled.value.code == pb.CANCELLED
    assert ends == ["end"]


async def test_what_work_raises_comes_through() -> None:
    async def work() -> None:
        raise Unavailable(pb.UNAVAILABLE, "lost")

    with pytest.raises(Unavailable):
        await a_client().while_present(work())


async def test_reader_gets_events_until_it_leaves() -> None:
    reader = Reader()
    client = a_client(reader)
    reading = asyncio.create_task(client.told())
    await settle()
    client.put(b"one", 1)
    reading.cancel()
    await settle()
    client.put(b"two", 1)
    assert reader.events == [b"one"]
    await client.end(None)


async def test_reader_hears_of_the_end_or_why_there_is_none() -> None:
    well, badly = a_client(Reader()), a_client(Reader())
    await well.end(None)
    await well.told()
    badly.close(Unavailable(pb.UNAVAILABLE, "lost"))
    badly.close(None)
    with pytest.raises(Unavailable):
        await badly.told()


async def test_reader_that_does_not_read_is_cut_off_alone() -> None:
    reader = Reader(room=1)
    client = a_client(reader)
    assert client.put(b"one", 1)
    assert client.put(b"two", 1)
    reader.room = 10
    assert client.put(b"three", 1)
    assert reader.events == [b"one"], "nothing comes behind a gap"
    with pytest.raises(Interrupted):
        await client.told()


async def test_runs_are_cancelled_by_their_name_and_forgotten_at_their_end() -> None:
    async with Tasks(Health()) as tasks:
        runs, client = BackgroundRuns(tasks), a_client()

        async def work() -> None:
            with contextlib.suppress(ShoalError):
                await client.while_present(asyncio.sleep(3600))

        runs.start(KEY, client, work)
        draining = asyncio.create_task(runs.drain())
        await settle()
        assert not runs.cancel(("another tenant", "resp_1"))
        assert not draining.done()
        assert runs.cancel(KEY)
        await draining
        assert not runs.cancel(KEY)


async def test_closing_process_takes_no_more() -> None:
    tasks = Tasks(Health())
    await tasks.close()
    with pytest.raises(Refused):
        BackgroundRuns(tasks).start(KEY, a_client(), lambda: asyncio.sleep(0))
