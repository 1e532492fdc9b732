"""Every reason for a miss."""

import pytest

from shoal_contracts.v1 import kvindex_pb2
from shoal_kvindex.departures import Departure, Way
from shoal_kvindex.explain import Elsewhere, MissReason, Verdict, explain
from shoal_kvindex.ingest.changes import Marks
from shoal_kvindex.kinds import LayerGroup, PoolLayout
from shoal_kvindex.names import SHARED, Level, Namespace, ObjectKey, Part, Place
from shoal_kvindex.recent import AskedPrompt, FirstMiss, Relative
from shoal_kvindex.service import Domain
from shoal_testkit.clock import VirtualClock

NOWHERE = Elsewhere(is_in_other_salt=False, is_in_other_pool=False)
NOTHING = FirstMiss()


def asked(miss: FirstMiss = NOTHING, hit_blocks: int = 2) -> AskedPrompt:
    return AskedPrompt("r", Namespace("pool", ""), bytes(32 * 5), 5, hit_blocks, 1_800_000_000, miss)


def reason(
    miss: FirstMiss = NOTHING, elsewhere: Elsewhere = NOWHERE, relatives: tuple[Relative, ...] = (), hit_blocks: int = 2
) -> MissReason:
    return explain(asked(miss, hit_blocks), elsewhere, relatives).reason


def test_whole_hit_is_no_miss() -> None:
    assert reason(FirstMiss(is_marked=True), hit_blocks=5) is MissReason.NO_MISS


def test_nothing_known_is_never_stored() -> None:
    assert reason() is MissReason.NEVER_STORED


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (Way.EXPIRED, MissReason.EXPIRED),
        (Way.EVICTED, MissReason.EVICTED),
        (Way.DROPPED, MissReason.DROPPED),
        (Way.DAMAGED, MissReason.DAMAGED),
    ],
)
def test_block_that_went_tells_how_and_when(way: Way, expected: MissReason) -> None:
    found = explain(asked(FirstMiss(departure=Departure(way, 1234))), NOWHERE, ())
    assert found == Verdict(expected, gone_at_s=1234)


def test_marked_and_incomplete_blocks_are_still_there() -> None:
    departed = Departure(Way.EXPIRED, 1234)  # an earlier time
    assert reason(FirstMiss(is_marked=True, departure=departed)) is MissReason.MARKED
    assert reason(FirstMiss(is_incomplete=True, departure=departed)) is MissReason.STATE_MISSING


def test_block_of_another_tenant_or_pool_is_named() -> None:
    assert reason(elsewhere=Elsewhere(is_in_other_salt=True, is_in_other_pool=True)) is MissReason.OTHER_SALT
    assert reason(elsewhere=Elsewhere(is_in_other_salt=False, is_in_other_pool=True)) is MissReason.OTHER_POOL


def test_own_past_comes_before_others() -> None:
    miss = FirstMiss(departure=Departure(Way.EXPIRED, 1))
    other = Relative("other", 2, is_other=True)
    assert reason(miss, Elsewhere(is_in_other_salt=True, is_in_other_pool=True), (other,)) is MissReason.EXPIRED


def test_prompt_that_goes_on_differently_names_the_latest_such_request() -> None:
    relatives = (
        Relative("first", 2, is_other=True),
        Relative("latest", 2, is_other=True),
        Relative("shorter", 2, is_other=False),
        Relative("less", 1, is_other=True),
    )
    assert explain(asked(), NOWHERE, relatives) == Verdict(MissReason.DIVERGED, nearest=relatives[1])


@pytest.mark.parametrize(
    ("relative", "hit_blocks"),
    [
        (Relative("had it too", 3, is_other=True), 2),
        (Relative("shorter", 2, is_other=False), 2),
        (Relative("less", 1, is_other=True), 2),
        (Relative("no stored prefix", 1, is_other=True), 0),
    ],
    ids=lambda value: value.request_id if isinstance(value, Relative) else str(value),
)
def test_prompt_that_does_not_differ_there_has_not_diverged(relative: Relative, hit_blocks: int) -> None:
    relatives = (Relative("other", 2, is_other=True), relative) if relative.shared_blocks > 2 else (relative,)
    assert reason(relatives=relatives, hit_blocks=hit_blocks) is MissReason.NEVER_STORED


def test_every_reason_of_the_wire_is_given() -> None:
    assert {"MISS_REASON_UNSPECIFIED", *(found.name for found in MissReason)} == set(kvindex_pb2.MissReason.keys())


# The same, from what happens to blocks to what is said of them.

SPACE = Namespace("pool", "")
BLOCKS = [number.to_bytes(32, "big") for number in range(4)]
NODE_A = Place(Level.L1, "node-a")
ONE_RANK = Part(0x01000100, 0)
WINDOW = Part(0x01000100, 1)


def store(domain: Domain, block_hash: bytes, place: Place = SHARED, space: Namespace = SPACE) -> ObjectKey:
    key = ObjectKey(space, block_hash, ONE_RANK)
    domain.directory.store(key, place, 10, 2_000_000_000)
    return key


def told(domain: Domain, hashes: list[bytes] = BLOCKS, hit_blocks: int = 1, request_id: str = "r") -> Verdict:
    """What is said of a request right after it was matched."""
    domain.explainer.matched(request_id, SPACE, b"".join(hashes), hit_blocks)
    explanation = domain.explainer.explain(request_id)
    assert explanation is not None
    return explanation.verdict


@pytest.mark.parametrize(
    ("is_for_room", "expected"), [(False, MissReason.EXPIRED), (True, MissReason.EVICTED)], ids=["expired", "for room"]
)
def test_swept_block_was_marked_and_is_gone(
    domain: Domain, clock: VirtualClock, is_for_room: bool, expected: MissReason
) -> None:
    key = store(domain, BLOCKS[1])
    domain.applier.apply(Marks([(SPACE, BLOCKS[1:2])], is_for_room=is_for_room))
    assert told(domain).reason is MissReason.MARKED
    domain.directory.delete(key, SHARED)
    assert told(domain) == Verdict(expected, gone_at_s=int(clock.now()))


def test_block_that_nobody_marked_was_damaged(domain: Domain, clock: VirtualClock) -> None:
    domain.directory.delete(store(domain, BLOCKS[1]), SHARED)
    assert told(domain) == Verdict(MissReason.DAMAGED, gone_at_s=int(clock.now()))


def test_block_that_was_only_in_dram_was_dropped(domain: Domain, clock: VirtualClock) -> None:
    domain.directory.delete(store(domain, BLOCKS[1], NODE_A), NODE_A)
    assert told(domain) == Verdict(MissReason.DROPPED, gone_at_s=int(clock.now()))
    store(domain, BLOCKS[2], NODE_A)
    domain.directory.drop_l1("node-a")
    assert told(domain, hit_blocks=2) == Verdict(MissReason.DROPPED)


def test_block_in_dram_where_its_prefix_is_not_counts_as_dropped(domain: Domain) -> None:
    store(domain, BLOCKS[1], NODE_A)
    assert told(domain).reason is MissReason.DROPPED


def test_block_without_its_window_misses_state(domain: Domain) -> None:
    groups = (LayerGroup(0), LayerGroup(1, window_tokens=4))
    domain.directory.set_layout("pool", PoolLayout(block_tokens=4, groups=groups))
    for block_hash in BLOCKS:
        store(domain, block_hash)
    domain.directory.store(ObjectKey(SPACE, BLOCKS[0], WINDOW), SHARED, 10, 2_000_000_000)
    verdict = told(domain)
    explanation = domain.explainer.explain("r")
    assert verdict.reason is MissReason.STATE_MISSING
    assert explanation is not None
    assert (explanation.now_hit_blocks, explanation.block_tokens) == (1, 4)


def test_block_of_somebody_else_is_found(domain: Domain) -> None:
    store(domain, BLOCKS[1], space=Namespace("another pool", ""))
    assert told(domain).reason is MissReason.OTHER_POOL
    store(domain, BLOCKS[1], space=Namespace("pool", "tenant"))
    assert told(domain).reason is MissReason.OTHER_SALT


def test_what_the_request_itself_stores_afterwards_changes_nothing(domain: Domain) -> None:
    first = told(domain)
    for block_hash in BLOCKS:
        store(domain, block_hash)
    explanation = domain.explainer.explain("r")
    assert explanation is not None
    assert (explanation.verdict, explanation.now_hit_blocks) == (first, 4)
    assert first.reason is MissReason.NEVER_STORED


def test_next_turn_diverges_from_the_answer_that_was_settled(domain: Domain) -> None:
    told(domain, BLOCKS[:2], request_id="turn")
    domain.explainer.settled("turn", b"".join(BLOCKS))
    verdict = told(domain, [*BLOCKS[:3], bytes([7] * 32)], hit_blocks=3, request_id="next")
    assert verdict == Verdict(MissReason.DIVERGED, nearest=Relative("turn", 3, is_other=True))


def test_prompt_without_a_whole_block_misses_nothing(domain: Domain) -> None:
    assert told(domain, [], hit_blocks=0).reason is MissReason.NO_MISS


def test_unknown_request_is_not_explained(domain: Domain) -> None:
    assert domain.explainer.explain("never asked") is None
