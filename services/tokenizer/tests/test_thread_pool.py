import asyncio
import threading

import pytest

from shoal_contracts.errors import BadRequest, Refused
from shoal_contracts.v1 import common_pb2 as pb
from shoal_tokenizer.thread_pool import ThreadPool


async def test_what_does_not_fit_is_refused_at_once_and_room_comes_back() -> None:
    pool = ThreadPool(threads=1, max_waiting=1)
    gate = threading.Event()
    running = [asyncio.ensure_future(pool.run(gate.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Refused) as caught:
        await pool.run(gate.wait)
    assert caught.value.code == pb.OVERLOADED and caught.value.retry_after_s is not None
    gate.set()
    assert await asyncio.gather(*running) == [True, True]
    assert await pool.run(lambda: 5) == 5
    pool.close()


async def test_a_caller_that_leaves_takes_its_waiting_work_along() -> None:
    pool = ThreadPool(threads=1, max_waiting=1)
    gate = threading.Event()
    ran: list[int] = []
    first = asyncio.ensure_future(pool.run(gate.wait))
    second = asyncio.ensure_future(pool.run(lambda: ran.append(2)))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert pool.taken == 1
    gate.set()
    await first
    assert ran == []
    pool.close()


async def test_what_the_work_raises_is_raised_to_its_caller() -> None:
    def fail() -> None:
        raise BadRequest(pb.INVALID_REQUEST, "no")

    pool = ThreadPool(threads=1, max_waiting=0)
    with pytest.raises(BadRequest):
        await pool.run(fail)
    pool.close()
