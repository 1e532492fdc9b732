"""A simulated lmcache server that reports to one or several instances of kvindex over a line that tests can break.

The store itself never lies; what is lost, late or out of order is lost on ``ReportLine``, as on a network.
"""

import asyncio
import enum
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle

import httpx

from shoal_engine.scripted import (
    BlockKey,
    BlockStore,
    Prefetcher,
    ReporterSettings,
    ServedPool,
    StoreReporter,
    StoreServer,
    Timing,
)
from shoal_engine.scripted.store import Level, SharedLevel
from shoal_runtime.clock import SystemClock

BLOCK_BYTES = 1024


class Fate(enum.Enum):
    """What happens to deliveries of reports."""

    ARRIVES = "arrives"
    FAILS = "fails"  # answered 500, not read
    ARRIVES_UNANSWERED = "arrives_unanswered"  # read, and answered 500
    ARRIVES_LATE = "arrives_late"  # answered 500, and read after ``late_s``
    DEAD = "dead"  # nobody is there, for every call


class ReportLine(httpx.AsyncBaseTransport):
    """Sends each call to the next of ``urls``. Only POST /events has a fate, except of the dead."""

    def __init__(self, urls: Sequence[str], late_s: float = 0.5) -> None:
        self.fate = Fate.ARRIVES
        self.lost_deliveries = 0
        self._urls = cycle([httpx.URL(url) for url in urls])
        self._late_s = late_s
        self._inner = httpx.AsyncHTTPTransport()
        self._late: set[asyncio.Task[httpx.Response]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = next(self._urls)
        request.url = request.url.copy_with(host=url.host, port=url.port)
        if self.fate is Fate.DEAD:
            raise httpx.ConnectError("nobody is there", request=request)
        if request.url.path != "/events" or self.fate is Fate.ARRIVES:
            return await self._inner.handle_async_request(request)
        self.lost_deliveries += 1
        if self.fate is Fate.ARRIVES_UNANSWERED:
            response = await self._inner.handle_async_request(request)
            await response.aread()
            await response.aclose()
        elif self.fate is Fate.ARRIVES_LATE:
            late = asyncio.ensure_future(self._deliver_late(request))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
        return httpx.Response(500, request=request)

    async def _deliver_late(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(self._late_s)
        response = await self._inner.handle_async_request(request)
        await response.aread()
        await response.aclose()
        return response

    async def aclose(self) -> None:
        if self._late:
            await asyncio.wait(self._late)
        await self._inner.aclose()


class CountingStore(BlockStore):
    """Remembers how often each block was asked to be deleted, by level, also when it was not there.

    ``on_delete`` is called when such a request is done and not answered yet.
    """

    deletes: "Counter[tuple[bytes, str]]"
    on_delete: Callable[[], None] | None = None

    def delete(self, keys: Sequence[BlockKey], level: Level) -> int:
        self.deletes.update((key.block_hash, level) for key in keys)
        removed = super().delete(keys, level)
        if self.on_delete is not None:
            self.on_delete()
        return removed


@dataclass
class ScriptedStore:
    """Made by ``scripted_store``. Hashes are those of whole blocks, first block first."""

    pool: str
    blocks: CountingStore
    line: ReportLine

    def keep(self, hashes: Iterable[bytes]) -> None:
        """Computed blocks are stored on both levels."""
        self.blocks.store(self._keys(hashes))

    def lose(self, hashes: Iterable[bytes], level: str) -> None:
        """Somebody deletes them."""
        BlockStore.delete(self.blocks, self._keys(hashes), "l1" if level == "l1" else "l2")

    def held(self, level: str) -> set[bytes]:
        """What is there."""
        return {found.key.block_hash for found in self.blocks.objects("l1" if level == "l1" else "l2")}

    def _keys(self, hashes: Iterable[bytes]) -> list[BlockKey]:
        return [BlockKey(self.pool, block_hash) for block_hash in hashes]


@asynccontextmanager
async def scripted_store(
    instance_id: str, pool: str, shared: SharedLevel, line: ReportLine, l2_bytes: int = 0
) -> AsyncIterator[ScriptedStore]:
    """Registered, beating five times a second. At the end it signs off, unless the line is dead."""
    clock = SystemClock()
    settings = ReporterSettings(
        instance_id, "http://kvindex", heartbeat_s=0.2, flush_s=0.05, block_bytes=BLOCK_BYTES, l2_bytes=l2_bytes
    )
    reporter = StoreReporter(settings, clock, httpx.AsyncClient(base_url="http://kvindex", transport=line))
    blocks = CountingStore(shared, block_bytes=BLOCK_BYTES, listener=reporter.listen)
    blocks.deletes = Counter()
    server = StoreServer(blocks, ServedPool(pool, 128), Prefetcher(blocks, Timing(), clock).bring, reporter)
    await server.start()
    try:
        yield ScriptedStore(pool, blocks, line)
    finally:
        await server.stop()
