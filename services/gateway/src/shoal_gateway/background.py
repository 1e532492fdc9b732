"""Responses that are generated while nobody has to wait for them.

Each runs as a task of the process until it ends, is cancelled by a caller, or the gateway closes; its client is a
``BackgroundClient``. Who asked for its events reads them as long as it likes. docs/decisions/0033-stored-responses.md
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from shoal_contracts.errors import Interrupted, ShoalError
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.ports import Client
from shoal_runtime.tasks import Tasks, done_before

Key = tuple[str, str]  # tenant, response id


class BackgroundClient:
    """See ``ports.Client``. Always there until ``cancel``; passes events to ``reader`` while that is there."""

    has_head = True  # whatever ends the response is told by the response itself
    body = b""

    def __init__(self, reader: Client | None) -> None:
        self._reader = reader
        self._cancelled = asyncio.Event()
        self._told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        """A caller wants it to stop."""
        self._cancelled.set()

    async def told(self) -> None:
        """Return when the reader was given every event. Raises why it will not be."""
        try:
            await asyncio.shield(self._told)
        finally:
            self._reader = None

    def close(self, error: ShoalError | None) -> None:
        """The response has ended; ``error``: why, as far as the events do not tell it."""
        if self._told.done():
            return
        if error is None:
            self._told.set_result(None)
        else:
            self._told.set_exception(error)
            self._told.exception()  # the reader may have left: then nobody asks

    async def while_present(self, work: Coroutine[Any, Any, None]) -> None:
        if not await done_before(work, self._cancelled.wait()):
            raise Interrupted(pb.CANCELLED, "the response was cancelled")

    def put(self, events: bytes, event_count: int = 0) -> bool:
        if self._reader is not None and not self._reader.put(events, event_count):
            self._reader = None  # what it has is broken off, the response goes on
            self.close(Interrupted(pb.CANCELLED, "the client reads too slowly"))
        return True

    async def end(self, receipt_json: bytes | None) -> None:
        self.close(None)

    async def read_body(self) -> None:
        return

    def release_body(self) -> None:
        return

    def begin_events(self) -> None:
        return


class BackgroundRuns:
    """All that this gateway generates in the background. On one event loop."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._clients: dict[Key, BackgroundClient] = {}
        self._running: set[asyncio.Task[None]] = set()

    def start(self, key: Key, client: BackgroundClient, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work``, which raises nothing. Refused (DRAINING) when the process closes."""
        task = self._tasks.spawn(work, name="background_response")
        self._clients[key] = client
        self._running.add(task)

        def on_end(task: asyncio.Task[None]) -> None:
            self._running.discard(task)
            del self._clients[key]

        task.add_done_callback(on_end)

    def cancel(self, key: Key) -> bool:
        """False: it does not run here."""
        client = self._clients.get(key)
        if client is not None:
            client.cancel()
        return client is not None

    async def drain(self) -> None:
        """Return when all have ended, those included that begin meanwhile."""
        while self._running:
            await asyncio.wait(set(self._running))
