"""Step 5, its first half: find a decode worker that takes the request.

The policy orders the workers, the worker has the last word. While all are full the request waits here, in line with
those of its pool that came before; its KV is safe in the store. An offer that is not answered in time is cancelled
before the next worker is asked, so that no two workers run one request. docs/decisions/0005-decode-is-placed.md
"""

import asyncio
from dataclasses import dataclass

from shoal_contracts.errors import Refused, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.ports import DecodeFleet, Fallback, PlacedRequest, TokenSink
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import Placement
from shoal_gateway.silence import SilentPeers
from shoal_policy import PlacementPolicy
from shoal_runtime.clock import Clock

ROOM_EACH_S = 0.25  # a worker's own load reports come once a second; its refusal is the better answer
RETRY_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class PlaceLimits:
    """How long one worker may think, and how long a request waits for room."""

    accept_s: float
    wait_s: float


class PlaceStep:
    """Shared by all requests; knows only who waits, and which workers did not answer."""

    def __init__(self, fleet: DecodeFleet, policy: PlacementPolicy, limits: PlaceLimits, clock: Clock) -> None:
        self._fleet = fleet
        self._policy = policy
        self._limits = limits
        self._silent = SilentPeers("decode", clock)
        self._lines: dict[str, asyncio.Lock] = {}

    async def run(self, placement: Placement, sink: TokenSink, receipt: Receipt) -> PlacedRequest:
        """A worker that accepted. Refused (OVERLOADED) when none had room in time, Unavailable when there is none."""
        line = self._lines.setdefault(placement.pool, asyncio.Lock())
        if not line.locked():
            placed = await self._offer(placement, sink, receipt)
            if placed is not None:
                return placed
        try:
            async with asyncio.timeout(self._limits.wait_s), line:
                return await self._wait_for_room(placement, sink, receipt)
        except TimeoutError:
            if self._fleet.workers(placement.pool):
                raise Refused(
                    pb.OVERLOADED, "every decode worker is full; try again in a moment", retry_after_s=RETRY_AFTER_S
                ) from None
            raise Unavailable(
                pb.UNAVAILABLE, "no decode worker of the model is there; try again", retry_after_s=RETRY_AFTER_S
            ) from None

    async def _wait_for_room(self, placement: Placement, sink: TokenSink, receipt: Receipt) -> PlacedRequest:
        while (placed := await self._offer(placement, sink, receipt)) is None:
            await self._fleet.room(ROOM_EACH_S)
        return placed

    async def _offer(self, placement: Placement, sink: TokenSink, receipt: Receipt) -> PlacedRequest | None:
        """One round through the workers, best first."""
        workers = self._fleet.workers(placement.pool)
        ranked = self._policy.rank(placement.length_tokens, placement.request_id, workers)
        for instance_id in self._silent.last(ranked, str):
            receipt.decode.attempts += 1
            try:
                return await self._offer_to(instance_id, placement, sink)
            except (Refused, Unavailable) as error:
                if isinstance(error, Unavailable):
                    self._silent.note(instance_id)
                if Fallback.PLACEMENT_REFUSED not in receipt.fallbacks:
                    receipt.note(Fallback.PLACEMENT_REFUSED)
        return None

    async def _offer_to(self, instance_id: str, placement: Placement, sink: TokenSink) -> PlacedRequest:
        placed = self._fleet.place(instance_id, placement, sink)
        is_accepted = False
        try:
            async with asyncio.timeout(self._limits.accept_s):
                await placed.accepted()
            is_accepted = True
        except TimeoutError:
            raise Unavailable(pb.PEER_SILENT, "a decode worker did not answer in time") from None
        finally:
            if not is_accepted:
                placed.cancel()
        return placed
