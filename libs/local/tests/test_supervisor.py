"""Order of start and stop, failures that end the whole, and a keeper that cleans up after a killed supervisor."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from shoal_local.child import ChildSpec
from shoal_local.console import Console
from shoal_local.home import Home
from shoal_local.processes import family, is_alive, name_of
from shoal_local.supervisor import Supervisor

WAIT_S = 20.0
# Tells when it starts and when it ends; `is_ready` looks for the first line.
SCRIPT = "echo start {0} >> {1}; trap 'echo end {0} >> {1}; exit' TERM; while :; do sleep 0.02; done"


@pytest.fixture
def home(tmp_path):
    made = Home(tmp_path / "home")
    with made.hold():
        yield made


@pytest.fixture
def out():
    return io.StringIO()


@pytest.fixture
def supervisor(home, out):
    console = Console(home.logs, is_verbose=False, out=out)
    yield Supervisor(home, console, gateway_url="http://127.0.0.1:8000", nats_url="nats://x", served_name="tiny")
    console.close()


@pytest.fixture
def a_spec(tmp_path):
    story = tmp_path / "story"

    def make(service, script=None, **changes):
        async def has_started():
            return story.exists() and f"start {service}\n" in story.read_text()

        return ChildSpec(
            **{
                "service": service,
                "argv": ("sh", "-c", script or SCRIPT.format(service, story)),
                "environ": dict(os.environ),
                "is_ready": has_started,
                "min_pause_s": 0.01,
                **changes,
            }
        )

    make.story = lambda: story.read_text().splitlines()
    return make


async def serve(supervisor, out, specs, *, start_timeout_s=WAIT_S):
    """Run until ready, then stop as Ctrl-C does; returns the exit code."""
    running = asyncio.create_task(supervisor.run(specs, start_timeout_s=start_timeout_s, drain_timeout_s=5.0))
    async with asyncio.timeout(WAIT_S):
        while "everything is ready" not in out.getvalue() and not running.done():
            await asyncio.sleep(0.01)
        if not running.done():
            os.kill(os.getpid(), signal.SIGTERM)
        return await running


async def test_users_start_after_what_they_need_and_end_before_it(supervisor, out, a_spec, home):
    specs = [
        a_spec("gateway", needs=frozenset({"nats"}), uses=frozenset({"decode"})),
        a_spec("decode", needs=frozenset({"nats"})),
        a_spec("nats"),
    ]
    assert await serve(supervisor, out, specs) == 0
    story = a_spec.story()
    assert story[0] == "start nats"
    assert story[3:] == ["end gateway", "end decode", "end nats"]
    assert home.read() is None


async def test_it_tells_the_way_to_a_first_answer(supervisor, out, a_spec):
    await serve(supervisor, out, [a_spec("gateway")])
    assert "curl -N http://127.0.0.1:8000/v1/chat/completions" in out.getvalue()
    assert '"model": "tiny"' in out.getvalue()
    assert "MiB" in out.getvalue()


async def test_a_process_that_cannot_run_ends_the_whole(supervisor, out, a_spec):
    specs = [a_spec("nats"), a_spec("decode", script="echo 'no weights'; exit 1")]
    assert await serve(supervisor, out, specs) == 1
    assert "decode: no weights" in out.getvalue()
    assert "decode cannot run" in out.getvalue()
    assert a_spec.story() == ["start nats", "end nats"]


async def test_a_process_that_cannot_even_be_made_is_told(supervisor, out, a_spec):
    too_long = {**os.environ, "TOO_LONG": "x" * 4_000_000}
    assert await serve(supervisor, out, [a_spec("a", environ=too_long)]) == 1
    assert "a cannot be started: Argument list too long" in out.getvalue()


async def test_a_start_without_end_is_given_up(supervisor, out, a_spec):
    async def never():
        return False

    specs = [a_spec("nats"), a_spec("decode", is_ready=never), a_spec("gateway", needs=frozenset({"decode"}))]
    assert await serve(supervisor, out, specs, start_timeout_s=1.0) == 1
    assert "not ready after 1 s: decode, gateway" in out.getvalue()
    assert "start gateway" not in a_spec.story()


async def test_a_second_signal_ends_everything_at_once(supervisor, out, a_spec):
    deaf = "trap '' TERM; echo start deaf >> {0}; while :; do sleep 0.02; done"
    spec = a_spec("deaf", script=deaf.format(a_spec("deaf").argv[2].split(">> ")[1].split(";")[0]))
    running = asyncio.create_task(supervisor.run([spec], start_timeout_s=WAIT_S, drain_timeout_s=60.0))
    async with asyncio.timeout(WAIT_S):
        for sign in ("everything is ready", "stopping in order"):
            while sign not in out.getvalue():
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0
    assert "asked twice" in out.getvalue()


def test_a_killed_supervisor_leaves_no_process_behind(tmp_path):
    program = f"""
        import asyncio, os
        from pathlib import Path
        from shoal_local.child import ChildSpec
        from shoal_local.console import Console
        from shoal_local.home import Home
        from shoal_local.supervisor import Supervisor
        async def ready(): return True
        home = Home(Path({str(tmp_path / "home")!r}))
        script = "sleep 60 & while :; do sleep 0.05; done"
        spec = ChildSpec("deaf", ("sh", "-c", script), dict(os.environ), ready)
        with home.hold():
            console = Console(home.logs, is_verbose=False)
            supervisor = Supervisor(home, console, gateway_url="x", nats_url="z", served_name="y")
            asyncio.run(supervisor.run([spec], start_timeout_s=9, drain_timeout_s=9))
    """
    argv = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "everything is ready" in line:
                break
        home = Home(tmp_path / "home")
        leader = home.read().children[0].name
        members = family(leader)
        assert len(members) >= 2
        process.kill()
    deadline = time.monotonic() + WAIT_S
    while any(is_alive(member) for member in [*members, *family(leader)]) or home.read() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert name_of(leader.pid) is None
