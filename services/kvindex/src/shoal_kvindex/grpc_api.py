"""The gRPC edge: protobuf to the index's own types and back; counts what was answered.

A Match that claims what it misses is answered as soon as the claim holds here; the other instances hear of it through
the log, which nobody waits for. docs/decisions/0012-one-computation-for-one-prefix.md
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal_contracts.errors import BadRequest, Refused, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import kvindex_pb2, kvindex_pb2_grpc
from shoal_kvblocks import HASH_BYTES, split_hashes
from shoal_kvindex.directory import Level, Namespace
from shoal_kvindex.explain import Explainer
from shoal_kvindex.index import Index, Readiness, WaitOutcome
from shoal_kvindex.ingest.changes import PendingBlocks
from shoal_kvindex.metrics import (
    MATCH_SECONDS,
    MATCHED_BLOCKS,
    PENDING_BLOCKS,
    PENDING_MATCHES,
    SETTLED_BLOCKS,
    WAITING,
    WAITS,
)
from shoal_kvindex.overview import Overview, StoreView
from shoal_kvindex.prefixes import PendingRun, Prefixes
from shoal_kvindex.wire import ages_on_wire, sweep_on_wire
from shoal_policy import TrafficClass
from shoal_runtime.clock import Clock

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

LONGEST_WAIT_S = 10.0
MAX_BLOCKS = 65_536  # eight million tokens; one Match with more would hold all others up
MAX_ID_LENGTH = 256
MAX_POOL_LENGTH = 512
MAX_SALT_LENGTH = 128
ANSWER_MARGIN_S = 0.05  # left of the caller's deadline for the answer to travel

CLASSES = {
    pb.TRAFFIC_CLASS_UNSPECIFIED: TrafficClass.CHAT,
    pb.CHAT: TrafficClass.CHAT,
    pb.AGENT: TrafficClass.AGENT,
    pb.PROBE: TrafficClass.PROBE,
}
CLASSES_ON_WIRE = {value: key for key, value in CLASSES.items()}


@dataclass(frozen=True, slots=True)
class Parts:
    """Who knows the answers."""

    index: Index
    prefixes: Prefixes
    explainer: Explainer
    store_view: StoreView


class KvIndexApi(kvindex_pb2_grpc.KvIndexServicer):
    """Handlers of one server; they share the loop with everything else. ``tell`` takes a claim, or the end of one, to
    the other instances; it does not wait."""

    def __init__(self, parts: Parts, tell: Callable[[PendingBlocks], None], readiness: Readiness, clock: Clock) -> None:
        self._index = parts.index
        self._prefixes = parts.prefixes
        self._explainer = parts.explainer
        self._store_view = parts.store_view
        self._tell = tell
        self._readiness = readiness
        self._clock = clock

    async def Match(
        self,
        request: kvindex_pb2.MatchRequest,
        context: "ServicerContext[kvindex_pb2.MatchRequest, kvindex_pb2.MatchReply]",
    ) -> kvindex_pb2.MatchReply:
        self._check_loaded()
        namespace, hashes = _read_blocks(request)
        began_s = self._clock.monotonic()
        traffic_class = _class_of(request.traffic_class)
        hit = await self._index.match(namespace, hashes, traffic_class, request.hold_ms / 1000)
        MATCH_SECONDS.observe(self._clock.monotonic() - began_s)
        reply = kvindex_pb2.MatchReply(hit_blocks=hit.blocks, replay_tokens=hit.replay_tokens)
        for place, blocks in hit.at:
            reply.levels.add(level=_level_on_wire(place.level), store_instance_id=place.instance_id, blocks=blocks)
        pending = None
        if request.request_id:
            self._explainer.matched(request.request_id, namespace, request.block_hashes, hit.blocks)
            pending = self._share(request, namespace, hashes, hit.blocks)
        if pending is None:  # who is told to wait asks again
            MATCHED_BLOCKS.labels("hit").inc(hit.blocks)
            MATCHED_BLOCKS.labels("miss").inc(len(hashes) - hit.blocks)
            self._index.count(traffic_class, len(hashes), hit.blocks)
        else:
            reply.pending.blocks, reply.pending.request_id = pending.blocks, pending.request_id
        return reply

    async def Await(
        self,
        request: kvindex_pb2.AwaitRequest,
        context: "ServicerContext[kvindex_pb2.AwaitRequest, kvindex_pb2.AwaitReply]",
    ) -> kvindex_pb2.AwaitReply:
        self._check_loaded()
        if len(request.block_hash) != HASH_BYTES:
            raise BadRequest(pb.INVALID_REQUEST, "block_hash must be 32 bytes", param="block_hash")
        remaining_s = context.time_remaining()
        timeout_s = LONGEST_WAIT_S if remaining_s is None else min(LONGEST_WAIT_S, remaining_s - ANSWER_MARGIN_S)
        namespace = _namespace_of(request.pool, request.cache_salt)
        with WAITING.track_inprogress():
            outcome = await self._index.await_stored(
                namespace, request.block_hash, _level_asked(request.level), max(0.0, timeout_s)
            )
        WAITS.labels(outcome.value).inc()
        if outcome is WaitOutcome.REFUSED:
            raise Refused(pb.OVERLOADED, "too many requests wait for the store", retry_after_s=1)
        return kvindex_pb2.AwaitReply(is_stored=outcome is WaitOutcome.STORED)

    async def Settle(
        self,
        request: kvindex_pb2.SettleRequest,
        context: "ServicerContext[kvindex_pb2.SettleRequest, kvindex_pb2.SettleReply]",
    ) -> kvindex_pb2.SettleReply:
        self._check_loaded()
        namespace, hashes = _read_blocks(request)
        settlement = self._index.settle(namespace, hashes, _class_of(request.traffic_class))
        claimed_in = self._prefixes.end(request.request_id)
        if claimed_in is not None:
            self._tell(PendingBlocks(claimed_in, (), request.request_id, 0.0))
        self._explainer.settled(request.request_id, request.block_hashes)
        SETTLED_BLOCKS.labels("claimed").inc(settlement.claimed_blocks)
        SETTLED_BLOCKS.labels("awaited").inc(settlement.awaited_blocks)
        SETTLED_BLOCKS.labels("dropped").inc(settlement.dropped_claims)
        return kvindex_pb2.SettleReply(claimed_blocks=settlement.claimed_blocks)

    async def Explain(
        self,
        request: kvindex_pb2.ExplainRequest,
        context: "ServicerContext[kvindex_pb2.ExplainRequest, kvindex_pb2.ExplainReply]",
    ) -> kvindex_pb2.ExplainReply:
        if not request.request_id:
            raise BadRequest(pb.INVALID_REQUEST, "request_id must be given", param="request_id")
        explanation = self._explainer.explain(request.request_id)
        if explanation is None:
            raise BadRequest(pb.NOT_FOUND, "this instance does not remember the request")
        asked, verdict = explanation.asked, explanation.verdict
        nearest = verdict.nearest
        return kvindex_pb2.ExplainReply(
            whole_blocks=asked.whole_blocks,
            hit_blocks=asked.hit_blocks,
            now_hit_blocks=explanation.now_hit_blocks,
            reason=kvindex_pb2.MissReason.Value(verdict.reason.name),
            gone_at_unix_s=verdict.gone_at_s,
            nearest_request_id=nearest.request_id if nearest else "",
            first_other_block=nearest.shared_blocks if nearest else 0,
            block_tokens=explanation.block_tokens or 0,
            pool=asked.namespace.pool,
            asked_at_unix_s=asked.asked_at_s,
        )

    async def Overview(
        self,
        request: kvindex_pb2.OverviewRequest,
        context: "ServicerContext[kvindex_pb2.OverviewRequest, kvindex_pb2.OverviewReply]",
    ) -> kvindex_pb2.OverviewReply:
        self._check_loaded()
        return _overview_on_wire(self._store_view.overview())

    def _share(
        self, request: kvindex_pb2.MatchRequest, namespace: Namespace, hashes: Sequence[bytes], hit_blocks: int
    ) -> PendingRun | None:
        """Who else computes what this request misses; when nobody does, it is its own from now on."""
        now_s, request_id, for_s = self._clock.monotonic(), request.request_id, request.claim_pending_ms / 1000
        pending = self._prefixes.pending(namespace, hashes, hit_blocks, request_id, now_s)
        missing = hashes[hit_blocks:]
        if pending is not None:
            PENDING_MATCHES.labels("told").inc()
        elif missing and for_s > 0:
            is_claimed = self._prefixes.claim(namespace, missing, request_id, for_s, now_s)
            PENDING_MATCHES.labels("claimed" if is_claimed else "full").inc()
            if is_claimed:
                self._tell(PendingBlocks(namespace, missing, request_id, for_s))
            self._index.expect(namespace, missing, _class_of(request.traffic_class))
        PENDING_BLOCKS.set(len(self._prefixes))
        return pending

    def _check_loaded(self) -> None:
        if not self._readiness.is_loaded:
            raise Unavailable(pb.UNAVAILABLE, "the directory of stored blocks is still loading", retry_after_s=1)


def _read_blocks(request: kvindex_pb2.MatchRequest | kvindex_pb2.SettleRequest) -> tuple[Namespace, Sequence[bytes]]:
    try:
        hashes = split_hashes(request.block_hashes)
    except ValueError as error:
        raise BadRequest(pb.INVALID_REQUEST, str(error), param="block_hashes") from error
    if len(hashes) > MAX_BLOCKS:
        raise BadRequest(pb.INVALID_REQUEST, f"a prompt may have {MAX_BLOCKS} blocks", param="block_hashes")
    if len(request.request_id) > MAX_ID_LENGTH:
        raise BadRequest(pb.INVALID_REQUEST, f"an id may have {MAX_ID_LENGTH} characters", param="request_id")
    return _namespace_of(request.pool, request.cache_salt), hashes


def _namespace_of(pool: str, cache_salt: str) -> Namespace:
    """Within the bounds of what lmcache servers may report."""
    if len(cache_salt) > MAX_SALT_LENGTH:
        raise BadRequest(pb.INVALID_REQUEST, f"a salt may have {MAX_SALT_LENGTH} characters", param="cache_salt")
    return Namespace(_pool_of(pool), cache_salt)


def _pool_of(pool: str) -> str:
    if not pool or len(pool) > MAX_POOL_LENGTH or not pool.isascii():
        raise BadRequest(pb.INVALID_REQUEST, f"pool must be given, in {MAX_POOL_LENGTH} letters", param="pool")
    return pool


def _class_of(traffic_class: pb.TrafficClass.ValueType) -> TrafficClass:
    try:
        return CLASSES[traffic_class]
    except KeyError:
        raise BadRequest(pb.INVALID_REQUEST, "unknown traffic class", param="traffic_class") from None


def _level_asked(level: pb.Level.ValueType) -> Level | None:
    if level == pb.LEVEL_UNSPECIFIED:
        return None
    try:
        return Level(level)
    except ValueError:
        raise BadRequest(pb.INVALID_REQUEST, "unknown level", param="level") from None


def _level_on_wire(level: Level) -> pb.Level.ValueType:
    return pb.L1 if level is Level.L1 else pb.L2


def _overview_on_wire(overview: Overview) -> kvindex_pb2.OverviewReply:
    reply = kvindex_pb2.OverviewReply(
        blocks=overview.blocks,
        evicted_blocks=overview.evicted_blocks,
        shared_bytes=overview.shared_bytes,
        shared_capacity_bytes=overview.shared_capacity_bytes,
        is_complete=overview.is_complete,
        reason=overview.reason,
    )
    for store in overview.stores:
        reply.stores.add(store_instance_id=store.instance_id, address=store.address, l1_blocks=store.l1_blocks)
    for traffic_class, asked in overview.asked.items():
        reply.classes.add(
            traffic_class=CLASSES_ON_WIRE[traffic_class], asked_blocks=asked.asked_blocks, hit_blocks=asked.hit_blocks
        )
    state = overview.state
    if state is not None:
        reply.lease_holder = state.lease_holder
        reply.sweep.CopyFrom(sweep_on_wire(state))
        reply.ages.extend(ages_on_wire(state))
    return reply
