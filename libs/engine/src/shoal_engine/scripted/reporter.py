"""Tells kvindex what a simulated store did, in the protocol of LMCache's coordinator, faults included.

Registers first, then sends its capacities; beats; a 404 to a beat means "register again". Events are numbered when
they are sent; a batch that fails is dropped for ever and leaves a gap, as the real server does, so that what must
live with that is tested against it. Counted in ``lost_batches``; start and end of an outage are logged once.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from shoal_engine.scripted.store import KV_RANK, OBJECT_GROUP, BlockKey, Level, StoreEvent
from shoal_runtime.clock import Clock
from shoal_runtime.logs import get_logger

log = get_logger(__name__)

BACKENDS = {"l1": "dram", "l2": "fs"}
CALL_S = 2.0
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ReporterSettings:
    """Who reports, to whom, how often."""

    instance_id: str
    coordinator_url: str
    heartbeat_s: float = 5.0
    flush_s: float = 1.0
    l1_bytes: int = 0
    l2_bytes: int = 0  # capacity of the shared level; 0: not declared
    block_bytes: int = 0
    max_waiting_events: int = 10_000  # newer ones are dropped before they are numbered: a loss that leaves no gap


class StoreReporter:
    """``listen`` is a store's listener; ``start`` and ``stop`` belong to whoever runs the store. One event loop."""

    def __init__(self, settings: ReporterSettings, clock: Clock, http: httpx.AsyncClient | None = None) -> None:
        self.lost_batches = 0
        self.dropped_events = 0
        self._settings = settings
        self._clock = clock
        self._http = http or httpx.AsyncClient(base_url=settings.coordinator_url, timeout=CALL_S, trust_env=False)
        self._incarnation = int(clock.now())
        self._seq = 0
        self._waiting: deque[StoreEvent] = deque()
        self._http_port = 0
        self._is_registered = False
        self._is_outage = False
        self._task: asyncio.Task[None] | None = None

    @property
    def instance_id(self) -> str:
        return self._settings.instance_id

    def listen(self, event: StoreEvent) -> None:
        """Never blocks."""
        if len(self._waiting) >= self._settings.max_waiting_events:
            self.dropped_events += 1
            return
        self._waiting.append(event)

    async def start(self, http_port: int) -> None:
        """Register and report from now on. An absent coordinator is no error: it is tried again with each beat."""
        self._http_port = http_port
        await self._register()
        self._task = asyncio.create_task(self._run(), name="store-reporter")

    async def stop(self) -> None:
        """Send what is left and sign off. Idempotent."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None
        await self.flush()
        await self._call("DELETE", f"/instances/{self._settings.instance_id}")
        await self._http.aclose()

    async def _run(self) -> None:
        next_beat_s = self._clock.monotonic() + self._settings.heartbeat_s
        while True:
            await self._clock.sleep(self._settings.flush_s)
            await self.flush()
            if self._clock.monotonic() >= next_beat_s:
                next_beat_s += self._settings.heartbeat_s
                await self.beat()

    async def beat(self) -> None:
        """Register when we are not known, else say that we live."""
        if not self._is_registered:
            await self._register()
            return
        if await self._call("PUT", f"/instances/{self._settings.instance_id}/heartbeat") == 404:
            # The real server registers with the next beat only.
            self._is_registered = False

    async def _register(self) -> None:
        body = {
            "instance_id": self._settings.instance_id,
            "ip": HOST,
            "http_port": self._http_port,
            "metadata": {},
            "p2p_advertised_url": "",
            "mq_port": 0,
        }
        status = await self._call("POST", "/instances", body)
        self._is_registered = status is not None and status < 300
        if self._is_registered:
            own = self._settings
            await self._send(
                [self._batch("config", "l1", [], own.l1_bytes), self._batch("config", "l2", [], own.l2_bytes)]
            )

    async def flush(self) -> None:
        """Send everything that waits as one call."""
        if not self._waiting:
            return
        events = list(self._waiting)
        self._waiting.clear()
        await self._send([self._batch(event.kind, event.level, event.keys) for event in events])

    async def _send(self, batches: list[dict[str, Any]]) -> None:
        status = await self._call("POST", "/events", {"batches": batches})
        if status is None or status >= 300:
            self.lost_batches += len(batches)

    def _batch(
        self,
        kind: Literal["store", "access", "delete", "config"],
        level: Level,
        keys: Sequence[BlockKey],
        capacity_bytes: int = 0,
    ) -> dict[str, Any]:
        self._seq += 1
        size_bytes = self._settings.block_bytes if kind == "store" else 0
        return {
            "instance_id": self._settings.instance_id,
            "incarnation": self._incarnation,
            "seq": self._seq,
            "event_type": kind,
            "tier": level,
            "backend": "" if (kind, level) == ("access", "l1") else BACKENDS[level],
            "entries": [{**wire_object(key, size_bytes), "token_ids": [], "token_offset": -1} for key in keys],
            "shared": level == "l2",
            "ts": self._clock.now(),
            "capacity_bytes": capacity_bytes,
            "capacity_revision": 1 if kind == "config" else 0,
        }

    async def _call(self, method: str, path: str, body: Any = None) -> int | None:
        """The HTTP status; None when nobody answered in time."""
        try:
            async with asyncio.timeout(CALL_S):
                status = (await self._http.request(method, path, json=body)).status_code
        except (httpx.HTTPError, TimeoutError):
            status = None
        is_outage = status is None or (status >= 400 and status != 404)
        if is_outage != self._is_outage:
            self._is_outage = is_outage
            event = "coordinator.lost" if is_outage else "coordinator.found"
            log.warning(event, method=method, path=path, status=status, lost_batches=self.lost_batches)
        return status


def wire_object(key: BlockKey, size_bytes: int) -> dict[str, Any]:
    """An object as LMCache writes it, in its reports and in its listings."""
    return {
        "key": {
            "chunk_hash_hex": key.block_hash.hex(),  # the protocol's own word for a block
            "model_name": key.pool,
            "kv_rank": KV_RANK,
            "object_group_id": OBJECT_GROUP,
            "cache_salt": key.cache_salt,
        },
        "size_bytes": size_bytes,
    }
