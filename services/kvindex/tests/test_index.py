"""Match, Await and Settle, together with the reports that feed them."""

import asyncio
from collections.abc import Sequence

import pytest

from shoal_kvindex.directory import SHARED, Level, Namespace, ObjectKey, Part
from shoal_kvindex.index import WaitOutcome
from shoal_kvindex.ingest.reports import Kind, Report, ReportSource
from shoal_kvindex.kinds import LayerGroup, PoolLayout
from shoal_kvindex.overview import Asked
from shoal_kvindex.service import Domain
from shoal_kvindex.store.pending import PendingChanges
from shoal_policy import TrafficClass
from shoal_testkit.clock import VirtualClock, settle

SPACE = Namespace("pool", "")
PART = Part(0x01000100, 0)
DAY_S = 86_400
BLOCKS = [number.to_bytes(32, "big") for number in range(6)]


def stored(seq: int, *hashes: bytes, level: Level = Level.L2, is_shared: bool = True) -> Report:
    objects = [(ObjectKey(SPACE, block_hash, Part(0x01000100, 0)), 10) for block_hash in hashes]
    return Report(ReportSource("node-a", 1, seq), Kind.STORE, level, is_shared and level is Level.L2, objects)


def expires_in_days(domain: Domain, clock: VirtualClock, block_hash: bytes) -> float:
    expires_at_s = domain.directory.expires_at_s(SPACE, block_hash)
    assert expires_at_s is not None
    return (expires_at_s - clock.now()) / DAY_S


async def test_match_ends_at_the_first_block_that_is_not_stored(domain: Domain) -> None:
    domain.ingest.apply([stored(1, BLOCKS[0], BLOCKS[1], BLOCKS[3])])
    assert (await domain.index.match(SPACE, BLOCKS, TrafficClass.CHAT)).blocks == 2


async def test_match_renews_what_it_found_and_nothing_else(domain: Domain, clock: VirtualClock) -> None:
    domain.ingest.apply([stored(1, BLOCKS[0], BLOCKS[2])])
    await domain.index.match(SPACE, BLOCKS, TrafficClass.AGENT)
    assert expires_in_days(domain, clock, BLOCKS[0]) == 3
    assert expires_in_days(domain, clock, BLOCKS[2]) == 1


async def test_renewal_is_written_only_when_it_gains_more_than_a_tenth(
    domain: Domain, journal: PendingChanges, clock: VirtualClock
) -> None:
    domain.ingest.apply([stored(1, BLOCKS[0])])
    await domain.index.match(SPACE, BLOCKS[:1], TrafficClass.CHAT)
    journal.expiries.clear()
    await clock.advance(0.5 * DAY_S)
    await domain.index.match(SPACE, BLOCKS[:1], TrafficClass.CHAT)
    assert journal.expiries == {}
    await clock.advance(0.5 * DAY_S)
    await domain.index.match(SPACE, BLOCKS[:1], TrafficClass.CHAT)
    assert journal.expiries == {(SPACE, BLOCKS[0]): int(clock.now()) + 7 * DAY_S}


async def test_a_shorter_use_never_shortens(domain: Domain, clock: VirtualClock) -> None:
    domain.ingest.apply([stored(1, BLOCKS[0])])
    await domain.index.match(SPACE, BLOCKS, TrafficClass.CHAT)
    await domain.index.match(SPACE, BLOCKS, TrafficClass.PROBE)
    assert expires_in_days(domain, clock, BLOCKS[0]) == 7


def test_settle_claims_what_is_stored_and_what_is_reported_within_a_minute(domain: Domain, clock: VirtualClock) -> None:
    domain.ingest.apply([stored(1, BLOCKS[0])])
    settlement = domain.index.settle(SPACE, BLOCKS[:2], TrafficClass.CHAT)
    assert (settlement.claimed_blocks, settlement.awaited_blocks) == (1, 1)
    domain.ingest.apply([stored(2, BLOCKS[1])])
    assert expires_in_days(domain, clock, BLOCKS[1]) == 7


async def test_a_report_after_the_minute_finds_no_claim(domain: Domain, clock: VirtualClock) -> None:
    domain.index.settle(SPACE, BLOCKS[:1], TrafficClass.CHAT)
    await clock.advance(61)
    domain.ingest.apply([stored(1, BLOCKS[0])])
    assert expires_in_days(domain, clock, BLOCKS[0]) == pytest.approx(1)


def test_settle_is_idempotent(domain: Domain, clock: VirtualClock) -> None:
    domain.ingest.apply([stored(1, *BLOCKS)])
    first, second = (domain.index.settle(SPACE, BLOCKS, TrafficClass.AGENT) for _ in range(2))
    assert first == second
    assert first.claimed_blocks == len(BLOCKS)


def test_a_use_of_a_marked_block_shows_even_when_it_gains_little(domain: Domain, clock: VirtualClock) -> None:
    domain.ingest.apply([stored(1, *BLOCKS)])
    domain.index.settle(SPACE, BLOCKS, TrafficClass.CHAT)
    before_s = domain.directory.expires_at_s(SPACE, BLOCKS[0])
    domain.directory.mark(SPACE, BLOCKS[:1], is_for_room=True)
    domain.index.settle(SPACE, BLOCKS, TrafficClass.AGENT)
    assert before_s is not None
    assert domain.directory.expires_at_s(SPACE, BLOCKS[0]) == before_s + 1
    assert domain.directory.expires_at_s(SPACE, BLOCKS[1]) == before_s


def test_what_a_request_computes_is_kept_as_its_class_asks_before_it_settles(
    domain: Domain, clock: VirtualClock
) -> None:
    domain.index.expect(SPACE, BLOCKS[:2], TrafficClass.AGENT)
    domain.ingest.apply([stored(1, *BLOCKS)])
    assert expires_in_days(domain, clock, BLOCKS[1]) == 3
    assert expires_in_days(domain, clock, BLOCKS[2]) == 1


def test_claims_are_bounded_and_the_dropped_are_counted(domain: Domain) -> None:
    settlement = domain.index.settle(SPACE, BLOCKS, TrafficClass.CHAT)
    assert settlement.awaited_blocks == 6
    assert settlement.dropped_claims == 3


async def test_await_returns_at_once_when_stored(domain: Domain) -> None:
    domain.ingest.apply([stored(1, BLOCKS[0])])
    assert await domain.index.await_stored(SPACE, BLOCKS[0], Level.L2, 0) is WaitOutcome.STORED


async def test_await_is_woken_by_the_report_of_its_level(domain: Domain) -> None:
    waiting = asyncio.ensure_future(domain.index.await_stored(SPACE, BLOCKS[0], Level.L2, 5))
    anywhere = asyncio.ensure_future(domain.index.await_stored(SPACE, BLOCKS[0], None, 5))
    await settle()
    domain.ingest.apply([stored(1, BLOCKS[0], level=Level.L1)])
    await settle()
    assert (waiting.done(), anywhere.done()) == (False, True)
    domain.ingest.apply([stored(2, BLOCKS[0])])
    assert await waiting is WaitOutcome.STORED


async def test_await_gives_up_at_its_deadline_and_leaves_nothing_behind(domain: Domain) -> None:
    for _ in range(5):  # more than may wait at a time
        assert await domain.index.await_stored(SPACE, BLOCKS[0], None, 0) is WaitOutcome.NOT_STORED


async def test_await_refuses_when_too_many_wait(domain: Domain) -> None:
    waiting = [asyncio.ensure_future(domain.index.await_stored(SPACE, b, None, 5)) for b in BLOCKS[:2]]
    await settle()
    assert await domain.index.await_stored(SPACE, BLOCKS[2], None, 5) is WaitOutcome.REFUSED
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await domain.index.await_stored(SPACE, BLOCKS[2], None, 0) is WaitOutcome.NOT_STORED


async def test_a_match_keeps_blocks_at_least_as_long_as_the_caller_may_read_them(
    domain: Domain, clock: VirtualClock
) -> None:
    domain.ingest.apply([stored(1, *BLOCKS[:2])])
    await domain.index.match(SPACE, BLOCKS[:2], TrafficClass.PROBE)
    await domain.index.match(SPACE, BLOCKS[:1], TrafficClass.PROBE, hold_s=2 * DAY_S)
    assert expires_in_days(domain, clock, BLOCKS[0]) == pytest.approx(2, abs=1 / DAY_S)
    assert expires_in_days(domain, clock, BLOCKS[1]) == 1


async def test_a_hold_is_kept_to_the_second_though_a_renewal_would_gain_little(
    domain: Domain, clock: VirtualClock
) -> None:
    domain.ingest.apply([stored(1, BLOCKS[0])])
    await domain.index.match(SPACE, BLOCKS[:1], TrafficClass.PROBE, hold_s=DAY_S + 10)
    assert expires_in_days(domain, clock, BLOCKS[0]) * DAY_S >= DAY_S + 10


async def test_a_marked_block_is_neither_hit_nor_renewed(domain: Domain, clock: VirtualClock) -> None:
    domain.ingest.apply([stored(1, *BLOCKS[:3])])
    domain.directory.mark(SPACE, [BLOCKS[1]])
    assert (await domain.index.match(SPACE, BLOCKS, TrafficClass.CHAT)).blocks == 1
    assert expires_in_days(domain, clock, BLOCKS[1]) == 1


async def test_a_match_tells_what_must_be_replayed(domain: Domain) -> None:
    domain.directory.set_layout("pool", PoolLayout(128, (LayerGroup(0), LayerGroup(1, 300, is_replayable=True))))
    domain.ingest.apply([stored(1, *BLOCKS)])
    hit = await domain.index.match(SPACE, BLOCKS, TrafficClass.CHAT)
    assert (hit.blocks, hit.replay_tokens) == (len(BLOCKS), 300)


def test_blocks_asked_for_and_hit_are_counted_by_class(domain: Domain) -> None:
    for traffic_class in (TrafficClass.CHAT, TrafficClass.CHAT, TrafficClass.AGENT):
        domain.index.count(traffic_class, 6, 2)
    assert domain.index.asked == {
        TrafficClass.CHAT: Asked(12, 4),
        TrafficClass.AGENT: Asked(6, 2),
        TrafficClass.PROBE: Asked(0, 0),
    }


class Remembered:
    """A Recall that brings back what it was made with."""

    def __init__(self, domain: Domain, *hashes: bytes) -> None:
        self._domain = domain
        self._hashes = hashes
        self.asked: list[list[bytes]] = []

    async def recall(self, namespace: Namespace, hashes: Sequence[bytes]) -> None:
        self.asked.append(list(hashes))
        for block_hash in hashes:
            if block_hash in self._hashes:
                self._domain.directory.recall(ObjectKey(namespace, block_hash, PART), SHARED, 2**33)


async def test_only_blocks_that_the_bound_dropped_are_recalled(domain: Domain) -> None:
    recall = Remembered(domain, *BLOCKS[2:4])
    domain.index.recall_from(recall)
    domain.ingest.apply([stored(1, BLOCKS[0], BLOCKS[1], BLOCKS[4])])
    assert (await domain.index.match(SPACE, BLOCKS, TrafficClass.CHAT)).blocks == 2
    assert recall.asked == []  # the map has everything
    domain.directory.cut()
    assert (await domain.index.match(SPACE, BLOCKS, TrafficClass.CHAT)).blocks == 5
    assert recall.asked == [[BLOCKS[2], BLOCKS[3], BLOCKS[5]]]
    assert (await domain.index.match(SPACE, BLOCKS[:5], TrafficClass.CHAT)).blocks == 5
    assert len(recall.asked) == 1


async def test_nothing_is_recalled_after_a_marked_block(domain: Domain) -> None:
    recall = Remembered(domain)
    domain.index.recall_from(recall)
    domain.directory.cut()
    domain.ingest.apply([stored(1, *BLOCKS[:2])])
    domain.directory.mark(SPACE, [BLOCKS[1]])
    assert (await domain.index.match(SPACE, BLOCKS, TrafficClass.CHAT)).blocks == 1
    assert recall.asked == []
