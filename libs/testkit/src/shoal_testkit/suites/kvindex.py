"""What an index that tracks pending prefixes promises, over gRPC; ``FakeKvIndex`` and the real one both keep it."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import kvindex_pb2, kvindex_pb2_grpc
from shoal_kvblocks import HASH_BYTES, block_hashes
from shoal_runtime.grpc import call

BLOCKS = 6
POOL = "pool-of-the-suite"
LONG_MS = 60_000
TIMEOUT_S = 5.0

_seeds = itertools.count(1)


@dataclass(frozen=True, slots=True)
class IndexUnderTest:
    """An index, and the way in which blocks become stored there."""

    stub: "kvindex_pb2_grpc.KvIndexAsyncStub"
    store: Callable[[bytes], Awaitable[None]]

    async def match(
        self, hashes: bytes, request_id: str, claim_pending_ms: int | None = LONG_MS
    ) -> kvindex_pb2.MatchReply:
        """None only asks."""
        request = kvindex_pb2.MatchRequest(
            pool=POOL,
            block_hashes=hashes,
            traffic_class=pb.CHAT,
            request_id=request_id,
            claim_pending_ms=claim_pending_ms,
            hold_ms=1000,
        )
        return await call(self.stub.Match, request, timeout_s=TIMEOUT_S)

    async def is_stored(self, block_hash: bytes, timeout_s: float = TIMEOUT_S) -> bool:
        request = kvindex_pb2.AwaitRequest(pool=POOL, block_hash=block_hash, level=pb.L2)
        return (await call(self.stub.Await, request, timeout_s=timeout_s)).is_stored

    async def give_up(self, request_id: str) -> None:
        request = kvindex_pb2.SettleRequest(pool=POOL, traffic_class=pb.CHAT, request_id=request_id)
        await call(self.stub.Settle, request, timeout_s=TIMEOUT_S)


def a_prompt(shared: int = 0, of: bytes = b"") -> bytes:
    """Hashes of a prompt that nobody asked about; the first ``shared`` blocks are those of another one."""
    return of[: shared * HASH_BYTES] + block_hashes(pack_u32([next(_seeds)] * (BLOCKS - shared)), 1)


class PendingContract:
    """Subclasses give the fixture ``index``."""

    async def test_who_asks_first_computes_and_others_hear_of_it(self, index: IndexUnderTest) -> None:
        hashes = a_prompt()
        assert not (await index.match(hashes, "a")).HasField("pending")
        assert (await index.match(hashes, "b")).pending == kvindex_pb2.Pending(blocks=BLOCKS, request_id="a")
        branch = await index.match(a_prompt(4, hashes), "c")
        assert branch.pending == kvindex_pb2.Pending(blocks=4, request_id="a")
        assert not (await index.match(hashes, "a")).HasField("pending")
        assert not (await index.match(a_prompt(), "b")).HasField("pending")

    async def test_only_the_blocks_after_the_hit_are_claimed(self, index: IndexUnderTest) -> None:
        hashes = a_prompt()
        await index.store(hashes[: 2 * HASH_BYTES])
        assert (await index.match(hashes, "d")).hit_blocks == 2
        other = await index.match(hashes, "e")
        assert (other.hit_blocks, other.pending.blocks, other.pending.request_id) == (2, BLOCKS, "d")

    async def test_who_only_asks_claims_nothing(self, index: IndexUnderTest) -> None:
        hashes = a_prompt()
        await index.match(hashes, "f", claim_pending_ms=None)
        assert not (await index.match(hashes, "g")).HasField("pending")

    async def test_stored_blocks_are_awaited_found_and_not_pending(self, index: IndexUnderTest) -> None:
        hashes = a_prompt()
        await index.match(hashes, "h")
        waiting = asyncio.ensure_future(index.is_stored(hashes[-HASH_BYTES:]))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await index.store(hashes)
        assert await waiting
        found = await index.match(hashes, "i")
        assert (found.hit_blocks, found.HasField("pending")) == (BLOCKS, False)

    async def test_wait_ends_with_an_answer_before_its_deadline(self, index: IndexUnderTest) -> None:
        assert not await index.is_stored(a_prompt()[-HASH_BYTES:], 0.3)

    async def test_request_that_gives_up_leaves_its_blocks_to_the_next(self, index: IndexUnderTest) -> None:
        hashes = a_prompt()
        await index.match(hashes, "j")
        await index.give_up("j")
        await index.give_up("j")
        assert not (await index.match(hashes, "k")).HasField("pending")
        assert (await index.match(hashes, "l")).pending.request_id == "k"

    async def test_claim_lapses_by_itself(self, index: IndexUnderTest) -> None:
        hashes, began_s = a_prompt(), time.monotonic()
        await index.match(hashes, "m", claim_pending_ms=300)
        while (await index.match(hashes, "n", claim_pending_ms=None)).HasField("pending"):
            assert time.monotonic() - began_s < TIMEOUT_S
            await asyncio.sleep(0.02)
        assert time.monotonic() - began_s > 0.25
