"""One supervised process: started, watched until it answers, started again when it dies, ended in order.

A process leads its own session, so that a Ctrl-C at the terminal reaches only the supervisor, and its whole family
is ended with it. Deaths are counted and told; the pause before the next start doubles up to ``MAX_PAUSE_S`` and
falls back after ``SETTLED_S`` of good work. A process that was never ready and died ``START_ATTEMPTS`` times gives
up: then something is wrong that a restart does not cure. One that says its settings are wrong gives up at once.
"""

import asyncio
import codecs
import enum
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from shoal_local.console import Console
from shoal_local.home import remove_unused_segments
from shoal_local.processes import ProcessName, end_families, name_of
from shoal_runtime.settings import SETTINGS_WRONG

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
SETTLED_S = 60.0
START_ATTEMPTS = 3
LAST_LINES_S = 10.0
PROBE_S = 0.1
FORCE_S = 2.0
READ_BYTES = 65536
SETPRIV = shutil.which("setpriv")


class ChildState(enum.Enum):
    """Where a process stands."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    PAUSING = "pausing"
    FAILED = "failed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run and how to treat it. ``needs`` must be ready before it starts; ``uses`` must outlive it."""

    service: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    is_ready: Callable[[], Awaitable[bool]]
    needs: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()
    stop_signal: signal.Signals = signal.SIGTERM
    ready_timeout_s: float = 60.0
    min_pause_s: float = FIRST_PAUSE_S


class Child:
    """Lives on the supervisor's loop. ``run`` returns after ``stop``, or when it gave up (state FAILED)."""

    def __init__(self, spec: ChildSpec, console: Console, on_change: Callable[[], None]) -> None:
        self.spec = spec
        self.state = ChildState.WAITING
        self.name: ProcessName | None = None
        self.restarts = 0
        self.ready_after_s: float | None = None
        self.became_ready = asyncio.Event()
        self._console = console
        self._on_change = on_change
        self._stopping = asyncio.Event()
        self._failed_starts = 0
        self._started_s = 0.0  # of the present life
        self._pause_s = spec.min_pause_s

    async def run(self) -> None:
        """Keep the process alive until ``stop``."""
        while not self._stopping.is_set():
            exit_code, was_ready_s = await self._live()
            if self._stopping.is_set():
                break
            self.restarts += 1
            if self._gives_up(exit_code, was_ready_s):
                self._enter(ChildState.FAILED)
                return
            self._enter(ChildState.PAUSING)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._pause_s)
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
        self._enter(ChildState.ENDED)

    def _gives_up(self, exit_code: int, was_ready_s: float | None) -> bool:
        self._tell_last_lines(was_ready=was_ready_s is not None)
        if was_ready_s is None:
            self._failed_starts += 1
        else:
            self._failed_starts = 0
            if was_ready_s > SETTLED_S:
                self._pause_s = self.spec.min_pause_s
        ending = _describe_exit(exit_code)
        if exit_code == SETTINGS_WRONG:
            self._console.say(f"{self.spec.service} {ending}: a setting is wrong, see above", "ERROR")
            return True
        if not self.became_ready.is_set() and self._failed_starts >= START_ATTEMPTS:
            self._console.say(f"{self.spec.service} {ending}; it never became ready", "ERROR")
            return True
        self._console.say(
            f"{self.spec.service} {ending}; starting it again in {self._pause_s:g} s (restart {self.restarts})",
            "WARNING",
        )
        return False

    def _tell_last_lines(self, *, was_ready: bool) -> None:
        """Of a process that served, only what it wrote as it ended: what it wrote hours ago explains nothing."""
        since_s = time.monotonic() - LAST_LINES_S if was_ready else self._started_s
        for line in self._console.tail(self.spec.service, since_s=since_s):
            self._console.say(f"  {self.spec.service}: {line}", "WARNING")

    async def _live(self) -> tuple[int, float | None]:
        """One life of the process: its exit code, and for how long it was ready (None: never)."""
        self._started_s = time.monotonic()
        reader, writer = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *bound_to_parent(self.spec.argv),
                env=dict(self.spec.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                start_new_session=True,
            )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self.name = name_of(process.pid)
        self._enter(ChildState.STARTING)
        pump = asyncio.create_task(self._pump(reader))
        probe = asyncio.create_task(self._probe(process))
        try:
            # The pipe is ours and not asyncio's: a grandchild that holds it must not delay this wait.
            exit_code = await process.wait()
        finally:
            probe.cancel()
            await self._end_rest()
            with suppress(TimeoutError):
                await asyncio.wait_for(pump, FORCE_S)
        is_probed = probe.done() and not probe.cancelled() and probe.exception() is None
        self.name = None
        return exit_code, time.monotonic() - probe.result() if is_probed else None

    async def _probe(self, process: asyncio.subprocess.Process) -> float:
        """Wait until it answers; returns the time it did. A start that takes too long is ended."""
        try:
            async with asyncio.timeout(self.spec.ready_timeout_s):
                while not await self.spec.is_ready():
                    await asyncio.sleep(PROBE_S)
        except TimeoutError:
            self._console.say(f"{self.spec.service} was not ready after {self.spec.ready_timeout_s:g} s", "ERROR")
            process.kill()
            raise
        now = time.monotonic()
        self.ready_after_s = now - self._started_s
        self.became_ready.set()
        self._enter(ChildState.READY)
        self._console.say(f"{self.spec.service} is ready, {self.ready_after_s:.1f} s after its start")
        return now

    async def _pump(self, reader: int) -> None:
        loop = asyncio.get_running_loop()
        stream = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reader, "rb", buffering=0)
        )
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        rest = ""
        try:
            while received := await stream.read(READ_BYTES):
                *lines, rest = (rest + decoder.decode(received)).split("\n")
                for line in lines:
                    self._console.take(self.spec.service, line.rstrip("\r"))
            if rest:
                self._console.take(self.spec.service, rest)
        finally:
            transport.close()

    async def _end_rest(self) -> None:
        """The leader is gone: nothing of its family may stay, nor the shared memory that it could not free."""
        if self.name is not None:
            await asyncio.to_thread(end_families, [self.name], grace_s=0.0)
            await asyncio.to_thread(remove_unused_segments)

    async def stop(self, timeout_s: float) -> None:
        """End it: the stop signal, then force after ``timeout_s``. Returns when it is gone."""
        self._stopping.set()
        if self.name is None:
            return
        leader = self.name
        self._signal(leader, self.spec.stop_signal)
        deadline = time.monotonic() + timeout_s
        while self.name == leader and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self.name == leader:
            self._console.say(
                f"{self.spec.service} did not end within {timeout_s:.0f} s; ending it by force", "WARNING"
            )
            self.force()

    def force(self) -> None:
        """End it now."""
        self._stopping.set()
        if self.name is not None:
            self._signal(self.name, signal.SIGKILL)

    def _signal(self, name: ProcessName, number: signal.Signals) -> None:
        if name_of(name.pid) == name:
            with suppress(ProcessLookupError):
                os.kill(name.pid, number)

    def _enter(self, state: ChildState) -> None:
        self.state = state
        self._on_change()


def bound_to_parent(argv: tuple[str, ...]) -> tuple[str, ...]:
    """``argv``, told by the kernel to end when the supervisor dies. Where setpriv is missing the keeper does it."""
    return argv if SETPRIV is None else (SETPRIV, "--pdeathsig", "TERM", "--", *argv)


def _describe_exit(exit_code: int) -> str:
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
