"""What is kept of one Responses request, and when: the client's next turn may name a response as soon as it is told.

A plain response is written once, before its last events go out. One in the background is written as running before
the client hears of it, and again at its end, for which its gateway tries for a while when Postgres is away. Without
Postgres a plain response is answered all the same and told as not stored; one in the background is refused.
docs/decisions/0033-stored-responses.md
"""

import asyncio

from shoal_contracts.errors import Unavailable
from shoal_gateway.ports import Fallback, ResponseStore
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import Storage
from shoal_runtime.clock import Clock

KEEP_S = 2.0  # the client waits for its last event
INSIST_S = 60.0
INSIST_EACH_S = 1.0
WRITE_S = 10.0  # for the last of these tries
LAST_WORD_S = 0.8  # a gateway that closes gives its tasks a second


class ResponseKeeper:
    """Owned by the Lifecycle of its request."""

    def __init__(self, store: ResponseStore, tenant: str, storage: Storage, receipt: Receipt) -> None:
        self._store = store
        self._tenant = tenant
        self._storage = storage
        self._receipt = receipt
        self._unwritten: bytes | None = storage.lost_body  # of a background response; None: its end is written

    async def begin(self, budget_s: float) -> None:
        """A background response is there from now on. Unavailable when it cannot be kept."""
        await self._store.put_running(self._tenant, self._storage, budget_s + INSIST_S + WRITE_S)

    async def keep(self, body: bytes) -> None:
        """The response as it ended; called once, before the client hears of the end. Never fails."""
        self._unwritten = body
        try:
            async with asyncio.timeout(KEEP_S):
                await self._write(body)
        except (Unavailable, TimeoutError):
            if not self._storage.is_background:
                self._receipt.note(Fallback.RESPONSE_NOT_STORED)

    async def insist(self, clock: Clock) -> None:
        """Nobody waits: write the end of a background response, or that it was lost, until it works or time is over."""
        until_s = clock.monotonic() + INSIST_S
        while self._unwritten is not None:
            try:
                await self._write(self._unwritten)
            except Unavailable:
                if clock.monotonic() >= until_s:
                    self._receipt.note(Fallback.RESPONSE_NOT_STORED)
                    return
                await clock.sleep(INSIST_EACH_S)

    async def insist_briefly(self) -> None:
        """As ``insist``, for a gateway that closes: who asks later is told by the row's deadline otherwise."""
        try:
            async with asyncio.timeout(LAST_WORD_S):
                if self._unwritten is not None:
                    await self._write(self._unwritten)
        except (Unavailable, TimeoutError):
            self._receipt.note(Fallback.RESPONSE_NOT_STORED)

    async def _write(self, body: bytes) -> None:
        if self._storage.is_background:
            await self._store.finish(self._tenant, self._storage.response_id, body)
        else:
            await self._store.put_done(self._tenant, self._storage, body)
        self._unwritten = None
