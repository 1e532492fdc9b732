"""Background tasks: nothing ends unseen."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from shoal_contracts.errors import Refused
from shoal_runtime.health import Health
from shoal_runtime.metrics import RUNTIME
from shoal_runtime.tasks import LONGEST_PAUSE_S, Tasks, done_before
from shoal_testkit.clock import VirtualClock, settle


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def tasks(clock: VirtualClock) -> AsyncIterator[Tasks]:
    async with Tasks(Health(), clock=clock) as tasks:
        yield tasks


def _crashes(task: str) -> float:
    return RUNTIME.value("task_crashes_total", task=task)


@pytest.mark.logs_error("task.crashed")
async def test_a_crash_is_counted_and_does_not_end_the_others(tasks: Tasks) -> None:
    async def crash() -> None:
        raise RuntimeError("boom")

    before = _crashes("crash")
    waiting = tasks.spawn(asyncio.Event().wait, name="waits")  # type: ignore[arg-type]
    tasks.spawn(crash(), name="crash")
    await settle()
    assert _crashes("crash") == before + 1
    assert not waiting.done()


@pytest.mark.logs_error("task.crashed")
async def test_a_restarting_task_runs_again_after_a_growing_pause(clock: VirtualClock) -> None:
    health = Health()
    runs: list[float] = []

    async def crash() -> None:
        runs.append(clock.monotonic())
        raise RuntimeError("boom")

    async with Tasks(health, clock=clock) as tasks:
        tasks.spawn(crash, name="loop", restart=True)
        await settle()
        assert health.report == {"task.loop": "crashed, starts again soon"}
        await clock.advance(20)
        pauses = [round(b - a, 3) for a, b in itertools.pairwise(runs)]
        assert pauses[:3] == [0.1, 0.2, 0.4]
        assert max(pauses) == LONGEST_PAUSE_S


@pytest.mark.logs_error("task.crashed")
async def test_a_critical_crash_is_told_to_the_process(tasks: Tasks) -> None:
    told: list[str] = []
    tasks.on_critical = told.append

    async def crash() -> None:
        raise RuntimeError("boom")

    tasks.spawn(crash, name="heart", critical=True)
    await settle()
    assert told == ["task heart crashed"]


async def test_close_cancels_and_waits_and_then_refuses(tasks: Tasks) -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("wait")

    tasks.spawn(wait, name="wait")
    await settle()
    await tasks.close()
    assert ended == ["wait"] and len(tasks) == 0
    with pytest.raises(Refused):
        tasks.spawn(wait(), name="late")


async def test_a_coroutine_cannot_restart(tasks: Tasks) -> None:
    with pytest.raises(TypeError):
        work = asyncio.sleep(0)
        try:
            tasks.spawn(work, name="x", restart=True)
        finally:
            work.close()


async def test_work_that_is_done_before_its_end_is_its_result() -> None:
    ends: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("end")

    async def fails() -> None:
        raise ValueError("bad")

    assert await done_before(asyncio.sleep(0), waits())
    with pytest.raises(ValueError, match="bad"):
        await done_before(fails(), waits())
    await asyncio.sleep(0)
    assert ends == ["end", "end"]


async def test_work_that_is_ended_has_given_up_on_return_and_its_failure_is_nobodys() -> None:
    given_up: list[str] = []

    async def works() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            given_up.append("work")
            raise ValueError("while giving up")

    assert not await done_before(works(), asyncio.sleep(0))
    assert given_up == ["work"]
