"""The life of an embedded system: start in order of need, watch, drain in the reverse order, leave nothing behind.

One loop owns all processes. A process starts when what it needs is ready, so independent ones start side by side;
at the end a process is stopped when everything that uses it has ended. Both have deadlines; a second signal ends
all at once. If this process itself is killed, the kernel ends the processes and the keeper looks after the rest.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence

from shoal_local.child import Child, ChildSpec, ChildState
from shoal_local.console import Console
from shoal_local.home import ChildRecord, Home, Record, remove_unused_segments
from shoal_local.keeper import DONE
from shoal_local.process_table import process_table
from shoal_local.processes import boot_id, name_of
from shoal_local.terminal import as_text

PROGRESS_S = 5.0
LEAST_STOP_S = 1.0
KEEPER_S = 5.0


class Supervisor:
    """Runs one set of processes once. Made and used inside ``Home.hold``."""

    def __init__(self, home: Home, console: Console, *, gateway_url: str, nats_url: str, served_name: str) -> None:
        self._home = home
        self._console = console
        self._gateway_url = gateway_url
        self._nats_url = nats_url
        self._served_name = served_name
        self._children: dict[str, Child] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stop_asked = asyncio.Event()
        self._has_failed = False
        self._started_at_s = time.time()

    async def run(self, specs: Sequence[ChildSpec], *, start_timeout_s: float, drain_timeout_s: float) -> int:
        """Serve until a signal; returns the exit code of the program."""
        self._children = {spec.service: Child(spec, self._console, self._write_record) for spec in specs}
        self._write_record()
        self._listen_to_signals()
        async with keeper(self._home):
            try:
                if await self._become_ready(start_timeout_s):
                    self._tell_ready()
                    await self._stop_asked.wait()
            finally:
                await self._drain(drain_timeout_s)
        self._home.forget()
        return 1 if self._has_failed else 0

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup and background jobs ignore some on purpose.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop_asked.is_set():
            self._console.say("asked twice: ending everything now", "WARNING")
            for child in self._children.values():
                child.force()
            return
        self._console.say(f"{number.name}: stopping in order (once more ends everything at once)")
        self._stop_asked.set()

    async def _become_ready(self, timeout_s: float) -> bool:
        """Start everything; False when a stop was asked, a process gave up, or time ran out."""
        for service in self._children:
            self._tasks[service] = asyncio.create_task(self._start_when_needed(service), name=service)
        ready = asyncio.create_task(self._await_ready())
        watched = {
            ready,
            asyncio.create_task(self._stop_asked.wait()),
            asyncio.create_task(self._tell_progress(self._unready)),
        }
        try:
            await asyncio.wait(watched, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in watched:
                task.cancel()
        if ready.done() and not self._stop_asked.is_set():
            return True
        if not self._stop_asked.is_set():
            self._fail(f"not ready after {timeout_s:g} s: {', '.join(self._unready())}")
        return False

    async def _start_when_needed(self, service: str) -> None:
        child = self._children[service]
        for needed in child.spec.needs:
            await self._children[needed].became_ready.wait()
        try:
            await child.run()
        except OSError as error:  # no process can be made: out of memory, of files or of processes
            self._fail(f"{service} cannot be started: {error.strerror}")
            return
        if child.state is ChildState.FAILED:
            self._fail(f"{service} cannot run; all that it wrote is in {self._home.logs / service}.log")

    async def _await_ready(self) -> None:
        for child in self._children.values():
            await child.became_ready.wait()

    def _fail(self, reason: str) -> None:
        self._console.say(reason, "ERROR")
        self._has_failed = True
        self._stop_asked.set()

    def _unready(self) -> list[str]:
        return [name for name, child in self._children.items() if not child.became_ready.is_set()]

    def _unended(self) -> list[str]:
        return [name for name, task in self._tasks.items() if not task.done()]

    async def _tell_progress(self, awaited: Callable[[], list[str]]) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._console.say(f"waiting for {', '.join(awaited())}")

    def _tell_ready(self) -> None:
        self._console.say(f"everything is ready after {self._console.elapsed_s():.1f} s")
        self._console.say_plain(f"\n{as_text(process_table(self._record()))}\n\n{self._invitation()}")

    def _invitation(self) -> str:
        body = (
            f'{{"model": "{self._served_name}", "stream": true, "temperature": 0, '
            '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
        )
        return (
            f"Try it:\n\n  curl -N {self._gateway_url}/v1/chat/completions -H 'content-type: application/json' \\\n"
            f"    -d '{body}'\n\nOr talk to it: shoal chat    See who does what: shoal status\n"
            f"Logs: {self._home.logs}    Stop: Ctrl-C here, or `make down`\n"
        )

    async def _drain(self, timeout_s: float) -> None:
        """Stop users before what they use; what is left at the deadline is ended by force."""
        deadline = time.monotonic() + timeout_s
        self._stop_asked.set()
        ended = {service: asyncio.Event() for service in self._children}
        progress = asyncio.create_task(self._tell_progress(self._unended))
        async with asyncio.TaskGroup() as group:
            for service in self._tasks:
                group.create_task(self._stop_when_unused(service, ended, deadline))
        progress.cancel()
        await asyncio.to_thread(remove_unused_segments)
        self._console.say("stopped")

    async def _stop_when_unused(self, service: str, ended: dict[str, asyncio.Event], deadline: float) -> None:
        for user, child in self._children.items():
            if service in child.spec.uses | child.spec.needs:
                await ended[user].wait()
        child, task = self._children[service], self._tasks[service]
        if child.state is ChildState.WAITING:
            task.cancel()
        await child.stop(max(LEAST_STOP_S, deadline - time.monotonic()))
        await asyncio.wait({task})
        ended[service].set()

    def _record(self) -> Record:
        supervisor = name_of(os.getpid())
        assert supervisor is not None
        children = [
            ChildRecord(service, child.name, child.state.value, child.restarts, child.ready_after_s)
            for service, child in self._children.items()
        ]
        return Record(boot_id(), supervisor, self._gateway_url, self._nats_url, self._started_at_s, children)

    def _write_record(self) -> None:
        self._home.write(self._record())


@contextlib.asynccontextmanager
async def keeper(home: Home) -> AsyncIterator[None]:
    """A keeper beside this process for the time of the block; see its module."""
    argv = (sys.executable, "-m", "shoal_local.keeper", str(home.folder))
    with (home.logs / "keeper.log").open("ab") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, start_new_session=True
        )
    yield
    # Only after an orderly stop: an exception leaves the keeper without the word, so that it cleans up.
    with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
        await asyncio.to_thread(process.communicate, DONE + "\n", KEEPER_S)
