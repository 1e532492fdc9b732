"""The directory of stored blocks, asked with a short deadline and told without waiting.

Every instance holds the same directory: any ready one may be asked, another one when it fails and time is left. The
first block of a prompt decides who is asked first: prompts spread over all instances, and those that share a prefix
meet at one, which knows at once what the others are told of later. While none answers the health part "kvindex" says
so, and requests go on with an unknown hit. Only a wait for what another request computes takes long: its caller brings
the bound.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Literal

from shoal_contracts.errors import Refused, ShoalError, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import fleet_pb2, kvindex_pb2, kvindex_pb2_grpc
from shoal_gateway.links.peers import Channels, spawn_if_open, usable
from shoal_gateway.links.wire import WIRE_TRAFFIC_CLASSES
from shoal_gateway.metrics import SETTLE_DROPPED
from shoal_gateway.request import BlockClaim, Matched, PendingRun
from shoal_gateway.silence import SilentPeers
from shoal_kvblocks import HASH_BYTES
from shoal_runtime.grpc import call
from shoal_runtime.presence import Fleet, Member
from shoal_runtime.process import Process

HandoffLevel = Literal["any", "l1", "l2"]

LEVELS: dict[HandoffLevel, pb.Level.ValueType] = {"any": pb.LEVEL_UNSPECIFIED, "l1": pb.L1, "l2": pb.L2}
SETTLE_S = 5.0
AWAIT_MARGIN_S = 0.1  # for the way there and back: the index answers a little before the deadline
MAX_SETTLES = 256
MAX_DRAM_STORES = 16  # that a job names: one more prefetch costs less than a long list in every job
CLOSE_AFTER_CALLS = 2  # deadlines of a call, for the channel of an instance that left
HEALTH_PART = "kvindex"


class KvIndexLink:
    """See ``ports.KvIndex``."""

    def __init__(self, process: Process, fleet: Fleet, match_s: float, handoff_level: HandoffLevel) -> None:
        self._process = process
        self._fleet = fleet
        self._match_s = match_s
        self._level = LEVELS[handoff_level]
        self._channels = Channels(process, fleet, fleet_pb2.KVINDEX, CLOSE_AFTER_CALLS * max(match_s, SETTLE_S))
        self._settles = 0
        self._silent = SilentPeers("kvindex", process.clock)
        process.stack.push_async_callback(self._channels.close)

    async def match(self, claim: BlockClaim, *, hold_s: float, pending_s: float) -> Matched:
        request = kvindex_pb2.MatchRequest(
            pool=claim.pool,
            cache_salt=claim.cache_salt,
            block_hashes=claim.hashes,
            traffic_class=WIRE_TRAFFIC_CLASSES[claim.traffic_class],
            request_id=claim.request_id,
            claim_pending_ms=round(pending_s * 1000),
            hold_ms=round(hold_s * 1000),
        )
        clock = self._process.clock
        until_s = clock.monotonic() + self._match_s
        error: ShoalError = Unavailable(pb.UNAVAILABLE, "no kvindex is ready")
        for member in self._instances(claim):
            left_s = until_s - clock.monotonic()
            if left_s <= 0:
                break
            try:
                reply = await call(
                    kvindex_pb2_grpc.KvIndexStub(self._channels.get(member)).Match, request, timeout_s=left_s
                )
            except ShoalError as failed:
                error = failed
                if isinstance(failed, Unavailable):
                    self._silent.note(member.instance_id)
                continue
            self._process.health.set(HEALTH_PART, None)
            return _to_matched(reply)
        self._process.health.degrade(HEALTH_PART, "does not answer; hits are unknown")
        raise Unavailable(pb.UNAVAILABLE, "the index does not answer") from error

    async def await_stored(self, claim: BlockClaim, block: int, wait_s: float) -> bool:
        """One instance is asked, and none when it fails: the caller asks how things are in any case."""
        member = next(iter(self._instances(claim)), None)
        if member is None:
            raise Unavailable(pb.UNAVAILABLE, "no kvindex is ready")
        request = kvindex_pb2.AwaitRequest(
            pool=claim.pool,
            cache_salt=claim.cache_salt,
            block_hash=claim.hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES],
            level=self._level,
        )
        stub = kvindex_pb2_grpc.KvIndexStub(self._channels.get(member))
        try:
            reply = await call(stub.Await, request, timeout_s=wait_s + AWAIT_MARGIN_S)
        except Refused:
            raise
        except ShoalError as error:
            raise Unavailable(pb.UNAVAILABLE, "the index does not answer") from error
        return reply.is_stored

    def settle(self, claim: BlockClaim) -> None:
        if self._settles < MAX_SETTLES and spawn_if_open(self._process, self._settle(claim), "settle"):
            self._settles += 1
        else:
            SETTLE_DROPPED.inc()

    async def _settle(self, claim: BlockClaim) -> None:
        request = kvindex_pb2.SettleRequest(
            pool=claim.pool,
            cache_salt=claim.cache_salt,
            block_hashes=claim.hashes,
            traffic_class=WIRE_TRAFFIC_CLASSES[claim.traffic_class],
            request_id=claim.request_id,
        )
        try:
            for member in self._instances(claim):
                try:
                    await call(
                        kvindex_pb2_grpc.KvIndexStub(self._channels.get(member)).Settle, request, timeout_s=SETTLE_S
                    )
                except ShoalError:
                    continue
                return
            SETTLE_DROPPED.inc()
        finally:
            self._settles -= 1

    def _instances(self, claim: BlockClaim) -> list[Member]:
        """Whom to ask, in this order."""
        first_block = claim.hashes[:HASH_BYTES] or claim.first_block
        ordered = by_prefix(usable(self._fleet, fleet_pb2.KVINDEX), first_block)
        return self._silent.last(ordered, lambda member: member.instance_id)


def by_prefix(members: Iterable[Member], first_block: bytes) -> list[Member]:
    """The same order at every gateway; when an instance comes or leaves, only the prefixes that are its own move."""
    return sorted(
        members, key=lambda member: blake2b(member.instance_id.encode(), key=first_block, digest_size=8).digest()
    )


def _to_matched(reply: kvindex_pb2.MatchReply) -> Matched:
    pending = PendingRun(reply.pending.blocks, reply.pending.request_id) if reply.HasField("pending") else None
    in_dram = [hit for hit in reply.levels if hit.level == pb.L1 and hit.blocks >= reply.hit_blocks > 0]
    return Matched(reply.hit_blocks, pending, tuple(hit.store_instance_id for hit in in_dram[:MAX_DRAM_STORES]))
