"""Protobuf in, protobuf out."""

import asyncio
from typing import Any

import pytest

from shoal_contracts.errors import BadRequest, Refused, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import kvindex_pb2
from shoal_kvindex.directory import SHARED, Level, Namespace, ObjectKey, Part, Place
from shoal_kvindex.grpc_api import MAX_BLOCKS, KvIndexApi, Parts
from shoal_kvindex.index import Readiness
from shoal_kvindex.ingest.changes import IndexState, PendingBlocks, SweepCounts
from shoal_kvindex.ingest.instances import Address
from shoal_kvindex.metrics import CATALOGUE
from shoal_kvindex.service import Domain
from shoal_testkit.clock import VirtualClock, settle

BLOCKS = [number.to_bytes(32, "big") for number in range(4)]
SPACE = Namespace("pool", "tenant")


class Deadline:
    """The one thing that handlers ask their gRPC context for."""

    def __init__(self, remaining_s: float | None) -> None:
        self._remaining_s = remaining_s

    def time_remaining(self) -> float | None:
        return self._remaining_s


SOON: Any = Deadline(0.06)


@pytest.fixture
def told() -> list[PendingBlocks]:
    """What the other instances hear of claims."""
    return []


def an_api(
    domain: Domain, clock: VirtualClock, told: list[PendingBlocks], readiness: Readiness | None = None
) -> KvIndexApi:
    parts = Parts(domain.index, domain.prefixes, domain.explainer, domain.store_view)
    return KvIndexApi(parts, told.append, readiness or Readiness(is_loaded=True), clock)


@pytest.fixture
def api(domain: Domain, clock: VirtualClock, told: list[PendingBlocks]) -> KvIndexApi:
    return an_api(domain, clock, told)


def store(domain: Domain, block_hash: bytes, place: Place) -> None:
    domain.directory.store(ObjectKey(SPACE, block_hash, Part(0x01000100, 0)), place, 10, 100)


def match_request(**fields: Any) -> kvindex_pb2.MatchRequest:
    given: dict[str, Any] = {
        "pool": "pool",
        "cache_salt": "tenant",
        "block_hashes": b"".join(BLOCKS),
        "traffic_class": pb.AGENT,
    }
    return kvindex_pb2.MatchRequest(**(given | fields))


async def test_match_tells_hit_and_levels(domain: Domain, api: KvIndexApi) -> None:
    for block_hash in BLOCKS[:3]:
        store(domain, block_hash, SHARED)
    store(domain, BLOCKS[0], Place(Level.L1, "node-a"))
    reply = await api.Match(match_request(), SOON)
    assert reply == kvindex_pb2.MatchReply(
        hit_blocks=3,
        levels=[
            kvindex_pb2.LevelHit(level=pb.L2, blocks=3),
            kvindex_pb2.LevelHit(level=pb.L1, store_instance_id="node-a", blocks=1),
        ],
    )
    assert not reply.HasField("pending")


async def test_settle_tells_what_is_claimed(domain: Domain, api: KvIndexApi) -> None:
    store(domain, BLOCKS[0], SHARED)
    request = kvindex_pb2.SettleRequest(pool="pool", cache_salt="tenant", block_hashes=b"".join(BLOCKS))
    assert (await api.Settle(request, SOON)).claimed_blocks == 1


async def test_await_answers_before_the_callers_deadline(domain: Domain, api: KvIndexApi) -> None:
    store(domain, BLOCKS[0], Place(Level.L1, "node-a"))
    request = kvindex_pb2.AwaitRequest(pool="pool", cache_salt="tenant", block_hash=BLOCKS[0])
    assert (await api.Await(request, SOON)).is_stored
    request.level = pb.L2
    assert not (await api.Await(request, SOON)).is_stored


@pytest.mark.parametrize(
    "fields",
    [
        {"block_hashes": b"x"},
        {"block_hashes": bytes(32 * (MAX_BLOCKS + 1))},
        {"pool": ""},
        {"pool": "p" * 513},
        {"cache_salt": "s" * 129},
        {"request_id": "r" * 257},
        {"traffic_class": 77},
    ],
    ids=["hashes", "many hashes", "pool", "long pool", "salt", "id", "class"],
)
async def test_bad_match_is_refused_with_the_field(api: KvIndexApi, fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        await api.Match(match_request(**fields), SOON)
    assert refused.value.param == next(iter(fields))


async def test_bad_await_is_refused(api: KvIndexApi) -> None:
    with pytest.raises(BadRequest):
        await api.Await(kvindex_pb2.AwaitRequest(pool="pool", block_hash=b"short"), SOON)
    with pytest.raises(BadRequest):
        await api.Await(kvindex_pb2.AwaitRequest(pool="pool", block_hash=BLOCKS[0], level=9), SOON)  # type: ignore[arg-type]


async def test_nothing_is_answered_before_the_directory_is_loaded(domain: Domain, clock: VirtualClock) -> None:
    api = an_api(domain, clock, [], Readiness())
    with pytest.raises(Unavailable):
        await api.Match(match_request(), SOON)
    with pytest.raises(Unavailable):
        await api.Settle(kvindex_pb2.SettleRequest(pool="pool"), SOON)


async def test_too_many_waits_are_refused(api: KvIndexApi) -> None:
    later: Any = Deadline(5)
    asked = [kvindex_pb2.AwaitRequest(pool="pool", block_hash=block_hash) for block_hash in BLOCKS[:3]]
    waiting = [asyncio.ensure_future(api.Await(request, later)) for request in asked[:2]]
    await settle()
    with pytest.raises(Refused):
        await api.Await(asked[2], later)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def claiming(request_id: str, **fields: Any) -> kvindex_pb2.MatchRequest:
    return match_request(request_id=request_id, claim_pending_ms=10_000, **fields)


async def test_claim_is_told_to_the_others_and_to_who_asks_next(
    domain: Domain, api: KvIndexApi, told: list[PendingBlocks]
) -> None:
    store(domain, BLOCKS[0], SHARED)
    assert not (await api.Match(claiming("a"), SOON)).HasField("pending")
    assert told == [PendingBlocks(SPACE, BLOCKS[1:], "a", 10.0)]
    reply = await api.Match(claiming("b"), SOON)
    assert (reply.hit_blocks, reply.pending) == (1, kvindex_pb2.Pending(blocks=4, request_id="a"))
    assert len(told) == 1


async def test_claim_of_another_instance_is_heard_through_the_log(domain: Domain, api: KvIndexApi) -> None:
    domain.applier.apply(PendingBlocks(SPACE, BLOCKS[:2], "theirs", 5.0))
    assert (await api.Match(claiming("b"), SOON)).pending == kvindex_pb2.Pending(blocks=2, request_id="theirs")
    domain.applier.apply(PendingBlocks(SPACE, (), "theirs", 0.0))
    assert not (await api.Match(claiming("b"), SOON)).HasField("pending")


async def test_settle_ends_the_claim_once_and_tells_it(api: KvIndexApi, told: list[PendingBlocks]) -> None:
    await api.Match(claiming("a"), SOON)
    settle_request = kvindex_pb2.SettleRequest(pool="pool", cache_salt="tenant", request_id="a")
    for _ in range(2):
        await api.Settle(settle_request, SOON)
    assert told[1:] == [PendingBlocks(SPACE, (), "a", 0.0)]
    assert not (await api.Match(claiming("b"), SOON)).HasField("pending")


async def test_who_is_told_to_wait_is_counted_when_it_asks_again(domain: Domain, api: KvIndexApi) -> None:
    missed = CATALOGUE.value("matched_blocks_total", verdict="miss")
    await api.Match(claiming("a"), SOON)
    await api.Match(claiming("b"), SOON)
    assert CATALOGUE.value("matched_blocks_total", verdict="miss") == missed + 4
    for block_hash in BLOCKS:
        store(domain, block_hash, SHARED)
    await api.Match(claiming("b"), SOON)
    assert CATALOGUE.value("matched_blocks_total", verdict="miss") == missed + 4


async def test_only_a_request_with_a_name_claims_and_is_remembered(api: KvIndexApi, told: list[PendingBlocks]) -> None:
    await api.Match(claiming(""), SOON)
    await api.Match(match_request(request_id="asks only"), SOON)
    assert told == []
    assert (await api.Explain(kvindex_pb2.ExplainRequest(request_id="asks only"), SOON)).whole_blocks == 4


async def test_explain_tells_what_was_asked_and_what_would_be_answered_now(
    domain: Domain, api: KvIndexApi, clock: VirtualClock
) -> None:
    store(domain, BLOCKS[0], SHARED)
    await api.Match(claiming("a"), SOON)
    store(domain, BLOCKS[1], SHARED)
    reply = await api.Explain(kvindex_pb2.ExplainRequest(request_id="a"), SOON)
    assert reply == kvindex_pb2.ExplainReply(
        whole_blocks=4,
        hit_blocks=1,
        now_hit_blocks=2,
        reason=kvindex_pb2.NEVER_STORED,
        pool="pool",
        asked_at_unix_s=int(clock.now()),
    )


async def test_explain_names_the_request_that_goes_on_differently(domain: Domain, api: KvIndexApi) -> None:
    for block_hash in BLOCKS[:2]:
        store(domain, block_hash, SHARED)
    await api.Match(claiming("earlier"), SOON)
    other = [*BLOCKS[:2], bytes([9] * 32), bytes([8] * 32)]
    await api.Match(claiming("later", block_hashes=b"".join(other)), SOON)
    reply = await api.Explain(kvindex_pb2.ExplainRequest(request_id="later"), SOON)
    assert (reply.reason, reply.nearest_request_id, reply.first_other_block) == (kvindex_pb2.DIVERGED, "earlier", 2)


async def test_explain_knows_only_what_this_instance_was_asked(api: KvIndexApi) -> None:
    with pytest.raises(BadRequest) as refused:
        await api.Explain(kvindex_pb2.ExplainRequest(request_id="unknown"), SOON)
    assert refused.value.code == pb.NOT_FOUND
    with pytest.raises(BadRequest):
        await api.Explain(kvindex_pb2.ExplainRequest(), SOON)


async def test_overview_is_what_the_parts_know(domain: Domain, api: KvIndexApi) -> None:
    before = await api.Overview(kvindex_pb2.OverviewRequest(), SOON)
    assert not before.HasField("shared_capacity_bytes")
    assert (before.is_complete, before.lease_holder) == (False, "")
    store(domain, BLOCKS[0], SHARED)
    await api.Match(claiming("a"), SOON)
    domain.instances.register("node-a", Address("10.0.0.1", 9000))
    counts = SweepCounts(expired_blocks=3)
    domain.applier.apply(IndexState(True, "", "kvindex-1", 1_700_000_000, counts, [(3600, 5)]))
    reply = await api.Overview(kvindex_pb2.OverviewRequest(), SOON)
    assert (reply.blocks, reply.shared_bytes, reply.is_complete, reply.lease_holder) == (1, 10, True, "kvindex-1")
    assert [(one.store_instance_id, one.address) for one in reply.stores] == [("node-a", "10.0.0.1:9000")]
    agents = [(one.asked_blocks, one.hit_blocks) for one in reply.classes if one.traffic_class == pb.AGENT]
    assert agents == [(4, 1)]
    assert [(age.expires_within_s, age.blocks) for age in reply.ages] == [(3600, 5)]
    assert (reply.sweep.expired_blocks, reply.sweep.last_listing_unix_s) == (3, 1_700_000_000)
