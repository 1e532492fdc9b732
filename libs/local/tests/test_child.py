"""A supervised process: readiness, restarts that are counted and bounded, an end that leaves no family."""

import asyncio
import io
import os
import re
import signal

import pytest

from shoal_local.child import START_ATTEMPTS, Child, ChildSpec, ChildState
from shoal_local.console import Console
from shoal_local.processes import family
from shoal_runtime.settings import SETTINGS_WRONG

WAIT_S = 10.0


async def always_ready():
    return True


async def never_ready():
    return False


@pytest.fixture
def out():
    return io.StringIO()


@pytest.fixture
def console(tmp_path, out):
    made = Console(tmp_path, is_verbose=True, out=out)
    yield made
    made.close()


@pytest.fixture
def start(console):
    """Runs a shell script as a supervised child on the test's loop."""

    def start(script, **changes):
        spec = ChildSpec(
            **{
                "service": "victim",
                "argv": ("sh", "-c", script),
                "environ": dict(os.environ),
                "is_ready": always_ready,
                "min_pause_s": 0.01,
                **changes,
            }
        )
        child = Child(spec, console, lambda: None)
        return child, asyncio.create_task(child.run())

    return start


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_process_becomes_ready_and_ends_when_asked(start, out):
    child, running = start("echo hello; exec sleep 60")
    await asyncio.wait_for(child.became_ready.wait(), WAIT_S)
    await until(lambda: "victim    | hello" in out.getvalue())
    assert child.state is ChildState.READY
    assert child.ready_after_s is not None
    await child.stop(WAIT_S)
    await asyncio.wait_for(running, WAIT_S)
    assert (child.state, child.restarts, child.name) == (ChildState.ENDED, 0, None)


async def test_wrong_settings_are_not_tried_again(start, out):
    child, running = start(f"echo 'SHOAL_X is no setting'; exit {SETTINGS_WRONG}", is_ready=never_ready)
    await asyncio.wait_for(running, WAIT_S)
    assert (child.state, child.restarts) == (ChildState.FAILED, 1)
    assert "victim: SHOAL_X is no setting" in out.getvalue()
    assert "a setting is wrong" in out.getvalue()


async def test_a_killed_process_is_started_again_and_counted(start, out):
    child, running = start("exec sleep 60")
    await asyncio.wait_for(child.became_ready.wait(), WAIT_S)
    first = child.name
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: child.restarts == 1 and child.state is ChildState.READY)
    assert child.name != first
    assert "victim was ended by SIGKILL; starting it again in 0.01 s (restart 1)" in out.getvalue()
    await child.stop(WAIT_S)
    await running


async def test_a_process_that_never_becomes_ready_gives_up_and_tells_its_last_words(start, out):
    child, running = start("echo 'no such model' >&2; exit 7", is_ready=never_ready)
    await asyncio.wait_for(running, WAIT_S)
    assert (child.state, child.restarts) == (ChildState.FAILED, START_ATTEMPTS)
    assert "victim: no such model" in out.getvalue()
    assert "victim ended with exit code 7; it never became ready" in out.getvalue()


async def test_a_start_that_takes_too_long_is_ended(start, out):
    child, running = start("exec sleep 60", is_ready=never_ready, ready_timeout_s=0.05)
    await asyncio.wait_for(running, WAIT_S)
    assert child.state is ChildState.FAILED
    assert "victim was not ready after 0.05 s" in out.getvalue()


async def test_pauses_between_restarts_grow(start, out):
    child, running = start("exec sleep 60", min_pause_s=0.02)
    await asyncio.wait_for(child.became_ready.wait(), WAIT_S)
    for restart in (1, 2, 3):
        os.kill(child.name.pid, signal.SIGKILL)
        await until(lambda restart=restart: child.restarts == restart and child.state is ChildState.READY)
    pauses = re.findall(r"again in (\S+) s", out.getvalue())
    assert pauses == ["0.02", "0.04", "0.08"]
    await child.stop(WAIT_S)
    await running


async def test_what_ignores_the_stop_signal_is_ended_by_force(start, out):
    child, running = start("trap '' TERM; echo deaf; while :; do sleep 0.05; done")
    await until(lambda: "deaf" in out.getvalue())
    await child.stop(0.1)
    await asyncio.wait_for(running, WAIT_S)
    assert "ending it by force" in out.getvalue()


async def test_grandchildren_end_with_the_process(start, out):
    child, running = start("sleep 60 & echo started; wait")
    await until(lambda: "started" in out.getvalue())
    leader = child.name
    assert len(family(leader)) == 2
    os.kill(leader.pid, signal.SIGKILL)
    await until(lambda: child.restarts == 1)
    assert family(leader) == []
    await child.stop(WAIT_S)
    await asyncio.wait_for(running, WAIT_S)


async def test_a_stop_during_the_pause_starts_nothing_again(start):
    child, running = start("exec sleep 60", min_pause_s=60.0)
    await asyncio.wait_for(child.became_ready.wait(), WAIT_S)
    os.kill(child.name.pid, signal.SIGKILL)
    await until(lambda: child.state is ChildState.PAUSING)
    await child.stop(WAIT_S)
    await asyncio.wait_for(running, WAIT_S)
    assert child.state is ChildState.ENDED


async def test_broken_utf8_and_unfinished_lines_arrive(start, out):
    child, running = start(r"printf 'caf\303\251\nbad \377 end'; exec sleep 60 >/dev/null 2>&1")
    await until(lambda: "bad � end" in out.getvalue())
    assert "victim    | café" in out.getvalue()
    await child.stop(WAIT_S)
    await running
