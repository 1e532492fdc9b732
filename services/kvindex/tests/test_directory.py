"""The map: copies, ranks and groups of layers, expiry, bound."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_kvindex.directory import (
    SHARDS,
    SHARED,
    Directory,
    Level,
    Namespace,
    ObjectKey,
    Part,
    Place,
    PlaceCount,
    Readable,
    is_whole,
)
from shoal_kvindex.kinds import LayerGroup, PoolLayout
from shoal_kvindex.store.pending import PendingChanges

SPACE = Namespace("pool", "")
ONE_RANK = Part(0x01000100, 0)
NODE_A, NODE_B = Place(Level.L1, "node-a"), Place(Level.L1, "node-b")
NOBODY = Readable(False, frozenset())


def block(number: int) -> bytes:
    return number.to_bytes(32, "big")


def key(number: int, part: Part = ONE_RANK, namespace: Namespace = SPACE) -> ObjectKey:
    return ObjectKey(namespace, block(number), part)


def a_directory(max_blocks: int = 1000) -> Directory:
    return Directory(PendingChanges(100_000), max_blocks)


def readable(directory: Directory, number: int, namespace: Namespace = SPACE) -> Readable | None:
    return next(directory.readable_run(namespace, [block(number)]), None)


def test_a_block_is_readable_where_it_was_stored() -> None:
    directory = a_directory()
    directory.store(key(1), NODE_A, 10, 100)
    assert readable(directory, 1) == Readable(False, frozenset({"node-a"}))
    directory.store(key(1), SHARED, 10, 100)
    assert readable(directory, 1) == Readable(True, frozenset({"node-a"}))
    directory.delete(key(1), NODE_A)
    assert readable(directory, 1) == Readable(True, frozenset())
    directory.delete(key(1), SHARED)
    assert readable(directory, 1) is None
    assert directory.block_count == 0


def test_salt_and_pool_separate_equal_hashes() -> None:
    directory = a_directory()
    directory.store(key(1), SHARED, 10, 100)
    assert readable(directory, 1, Namespace("pool", "tenant")) is None
    assert readable(directory, 1, Namespace("other", "")) is None


def test_a_copy_is_whole_only_with_all_ranks() -> None:
    directory = a_directory()
    directory.store(key(1, Part(0x02000200, 0)), SHARED, 10, 100)
    assert readable(directory, 1) == NOBODY
    directory.store(key(1, Part(0x02010201, 0)), SHARED, 10, 100)
    assert readable(directory, 1) == Readable(True, frozenset())


def test_ranks_at_different_places_do_not_make_a_copy() -> None:
    directory = a_directory()
    directory.store(key(1, Part(0x02000200, 0)), NODE_A, 10, 100)
    directory.store(key(1, Part(0x02010201, 0)), NODE_B, 10, 100)
    assert readable(directory, 1) == NOBODY


def test_a_group_of_layers_once_seen_in_a_pool_is_needed_from_then_on() -> None:
    directory = a_directory()
    directory.store(key(1), SHARED, 10, 100)
    assert readable(directory, 1) == Readable(True, frozenset())
    directory.store(key(2, Part(0x01000100, 1)), SHARED, 10, 100)
    assert readable(directory, 1) == NOBODY
    directory.store(key(1, Part(0x01000100, 1)), SHARED, 10, 100)
    assert readable(directory, 1) == Readable(True, frozenset())


def test_dropping_a_server_hides_its_copies_at_once_and_only_its() -> None:
    directory = a_directory()
    for place in (NODE_A, NODE_B):
        directory.store(key(1), place, 10, 100)
    directory.store(key(2), NODE_A, 10, 100)
    directory.drop_l1("node-a")
    assert readable(directory, 1) == Readable(False, frozenset({"node-b"}))
    assert readable(directory, 2) == NOBODY
    directory.store(key(2), NODE_A, 10, 100)  # its next life
    assert readable(directory, 2) == Readable(False, frozenset({"node-a"}))
    assert readable(directory, 1) == Readable(False, frozenset({"node-b"}))


def test_storing_again_keeps_the_expiry_of_a_known_block() -> None:
    directory = a_directory()
    directory.store(key(1), NODE_A, 10, 500)
    directory.store(key(1), SHARED, 10, 100)
    assert directory.expires_at_s(SPACE, block(1)) == 500


def test_renewal_follows_the_rule_and_tells_the_journal_only_changes() -> None:
    journal = PendingChanges(1000)
    directory = Directory(journal, 1000)
    for number, expires_at_s in ((1, 100), (2, 900)):
        directory.store(key(number), SHARED, 10, expires_at_s)
    journal.expiries.clear()
    known = directory.renew(SPACE, [block(1), block(2), block(3)], lambda old: 1000 if old < 500 else None)
    assert known == 2
    assert journal.expiries == {(SPACE, block(1)): 1000}
    assert directory.expires_at_s(SPACE, block(1)) == 1000


def test_the_bound_evicts_what_was_renewed_longest_ago_and_tells_nobody() -> None:
    journal = PendingChanges(10_000)
    directory = Directory(journal, 100)
    for number in range(100):
        directory.store(key(number), SHARED, 10, 100)
    directory.renew(SPACE, [block(0), block(1)], lambda _: 1000)
    for number in range(100, 150):
        directory.store(key(number), SHARED, 10, 100)
    assert directory.block_count <= 100
    assert directory.evicted_count == 50
    assert readable(directory, 0) is not None
    assert readable(directory, 2) is None
    assert None not in journal.sizes.values()


def test_a_delete_of_an_evicted_block_still_reaches_the_journal() -> None:
    journal = PendingChanges(10_000)
    Directory(journal, 10).delete(key(1), SHARED)
    assert journal.sizes == {(key(1), SHARED): None}


PARTS = st.builds(Part, st.sampled_from([0x01000100, 0x02000200, 0x02010201]), st.integers(0, 1))
PLACES = st.sampled_from([SHARED, NODE_A, NODE_B])
CHANGES = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 3), PARTS, PLACES),
    st.tuples(st.just("delete"), st.integers(0, 3), PARTS, PLACES),
    st.tuples(st.just("drop"), st.just(0), st.just(ONE_RANK), st.sampled_from([NODE_A, NODE_B])),
)


@settings(deadline=None, max_examples=50)
@given(st.lists(CHANGES, max_size=40))
def test_the_map_equals_a_plain_set_of_objects(changes: list[tuple[str, int, Part, Place]]) -> None:
    directory = a_directory()
    stored: set[tuple[int, Part, Place]] = set()
    groups: set[int] = set()
    for verb, number, part, place in changes:
        if verb == "store":
            directory.store(key(number, part), place, 1, 100)
            stored.add((number, part, place))
            groups.add(part.object_group_id)
        elif verb == "delete":
            directory.delete(key(number, part), place)
            stored.discard((number, part, place))
        else:
            directory.drop_l1(place.instance_id)
            stored = {known for known in stored if known[2] != place}
    for number in range(4):
        places = {
            place
            for place in (SHARED, NODE_A, NODE_B)
            if is_whole((part for n, part, at in stored if (n, at) == (number, place)), groups) and groups
        }
        joined = {
            node.instance_id
            for node in (NODE_A, NODE_B)
            if is_whole((part for n, part, at in stored if n == number and at in (node, SHARED)), groups) and groups
        }
        alone = frozenset(place.instance_id for place in places if place.level is Level.L1)
        expected = Readable(SHARED in places, alone, frozenset() if SHARED in places else frozenset(joined) - alone)
        assert (readable(directory, number) or NOBODY) == expected
        found = {(number, part, place) for place, part in directory.copies(SPACE, block(number))}
        assert found == {known for known in stored if known[0] == number}
    for place in (SHARED, NODE_A, NODE_B):
        objects = {(number, part) for number, part, at in stored if at == place}
        assert set(directory.objects_at(place, 0)) == {key(number, part) for number, part in objects}
        counts = [sum(1 for _, part in objects if part == one) for one in {part for _, part in objects}]
        assert directory.count(place) == PlaceCount(max(counts, default=0), len(objects), len(objects))


def test_use_keeps_a_prefix_in_the_bound_also_when_its_expiry_stays() -> None:
    journal = PendingChanges(10_000)
    directory = Directory(journal, 100)
    prefix = [block(number) for number in range(3)]
    for number in range(3):
        directory.store(key(number), SHARED, 10, 100)
    for number in range(3, 1000):
        directory.store(key(number), SHARED, 10, 100)
        journal.expiries.clear()
        assert directory.renew(SPACE, prefix, lambda _: None) == 3
        assert journal.expiries == {}
    assert directory.evicted_count > 0
    assert directory.expires_at_s(SPACE, block(0)) == 100


def test_a_block_split_over_a_server_and_the_shared_level_is_readable_there_only() -> None:
    directory = a_directory()
    directory.store(key(1, Part(0x02000200, 0)), NODE_A, 10, 100)
    directory.store(key(1, Part(0x02010201, 0)), SHARED, 10, 100)
    assert readable(directory, 1) == Readable(False, frozenset(), frozenset({"node-a"}))


def test_a_marked_block_ends_the_run_until_it_is_taken_back() -> None:
    directory = a_directory()
    for number in range(3):
        directory.store(key(number), SHARED, 10, 100)
    hashes = [block(number) for number in range(3)]
    assert directory.mark(SPACE, [block(1), block(9)], is_for_room=True) == 1
    assert directory.marked == {(SPACE, block(1)): True}
    assert len(list(directory.readable_run(SPACE, hashes))) == 1
    directory.store(key(1), NODE_A, 10, 100)
    assert len(list(directory.readable_run(SPACE, hashes))) == 1
    directory.unmark(SPACE, hashes)
    assert len(list(directory.readable_run(SPACE, hashes))) == 3
    assert not directory.is_marked(SPACE, block(1))


def test_a_marked_block_can_be_renewed_and_keeps_its_mark() -> None:
    directory = a_directory()
    directory.store(key(1), SHARED, 10, 100)
    directory.mark(SPACE, [block(1)])
    directory.extend(SPACE, [block(1)], 900)
    assert directory.expires_at_s(SPACE, block(1)) == 900
    assert readable(directory, 1) is None


def test_a_mark_goes_with_the_block() -> None:
    directory = a_directory(2)
    directory.store(key(1), SHARED, 10, 100)
    directory.mark(SPACE, [block(1)])
    directory.delete(key(1), SHARED)
    directory.store(key(1), SHARED, 10, 100)
    assert readable(directory, 1) is not None
    directory.mark(SPACE, [block(1)])
    for number in range(2, 9):
        directory.store(key(number), SHARED, 10, 100)
    assert directory.marked == {}


def test_extend_takes_the_later_expiry_and_tells_what_is_unknown() -> None:
    journal = PendingChanges(1000)
    directory = Directory(journal, 1000)
    for number, expires_at_s in ((1, 100), (2, 900)):
        directory.store(key(number), SHARED, 10, expires_at_s)
    journal.expiries.clear()
    assert directory.extend(SPACE, [block(1), block(2), block(3)], 500) == [block(3)]
    assert [directory.expires_at_s(SPACE, block(number)) for number in (1, 2, 3)] == [500, 900, None]
    assert journal.expiries == {(SPACE, block(1)): 500}


def test_it_is_told_when_a_report_takes_the_last_object_of_a_block() -> None:
    gone: list[tuple[Namespace, bytes, Place]] = []
    directory = Directory(PendingChanges(1000), 1000, on_gone=lambda *told: gone.append(told))
    for place in (NODE_A, NODE_B, SHARED):
        directory.store(key(1), place, 10, 100)
    directory.drop_l1("node-b")
    directory.delete(key(1), SHARED)
    assert gone == []
    for _ in range(2):
        directory.delete(key(1), NODE_A)
    assert gone == [(SPACE, block(1), NODE_A)]


def test_objects_of_a_place_are_found_by_the_first_byte_of_their_hash() -> None:
    directory = a_directory()
    hashes = [bytes([first]) + bytes(31) for first in (0, 7, 255)]
    for block_hash in hashes:
        for place in (SHARED, NODE_A):
            directory.store(ObjectKey(SPACE, block_hash, ONE_RANK), place, 10, 100)
    directory.delete(ObjectKey(SPACE, hashes[1], ONE_RANK), SHARED)
    found = {shard: list(directory.objects_at(SHARED, shard)) for shard in range(SHARDS)}
    assert {shard: keys for shard, keys in found.items() if keys} == {
        shard: [ObjectKey(SPACE, block_hash, ONE_RANK)] for shard, block_hash in ((0, hashes[0]), (255, hashes[2]))
    }


def test_a_shard_may_change_while_its_objects_are_looked_at() -> None:
    directory = a_directory()
    for number in range(3):
        directory.store(key(number), SHARED, 10, 100)
    objects = directory.objects_at(SHARED, 0)
    seen = [next(objects)]
    directory.delete(key(2), SHARED)
    directory.store(key(5), SHARED, 10, 100)
    assert [*seen, *objects] == [key(0), key(1), key(2)]


def test_bytes_follow_the_size_that_was_told_for_the_part() -> None:
    directory = a_directory()
    second = Part(0x01000100, 1)
    directory.restore(SPACE, SHARED, ONE_RANK, 10, [(0, block(1)[1:], 100)])
    directory.store(key(2), SHARED, 10, 100)
    directory.store(key(2, second), SHARED, 3, 100)
    directory.store(key(2, second), NODE_A, 3, 100)
    assert directory.count(SHARED) == PlaceCount(2, 3, 23)
    directory.delete(key(1), SHARED)
    directory.drop_l1("node-a")
    assert directory.count(SHARED) == PlaceCount(1, 2, 13)
    assert directory.count(NODE_A) == PlaceCount(0, 0, 0)


def test_bytes_of_dropped_blocks_are_still_there_until_their_delete() -> None:
    directory = a_directory(1)
    for number in range(5):
        directory.store(key(number), SHARED, 10, 100)
    assert directory.count(SHARED) == PlaceCount(5, 5, 50)
    directory.delete(key(0), SHARED)
    assert directory.count(SHARED) == PlaceCount(4, 4, 40)


def test_the_map_is_complete_until_the_bound_dropped_a_block_of_the_pool() -> None:
    directory = a_directory(5)
    other = Namespace("other", "")
    directory.store(key(0, namespace=other), SHARED, 10, 100)
    for number in range(5):
        directory.store(key(number), SHARED, 10, 100)
    assert (directory.is_complete("pool"), directory.is_complete("other")) == (False, True)
    directory.cut()
    assert not directory.is_complete("other")


def test_a_recalled_block_is_back_but_not_when_its_delete_was_just_reported() -> None:
    directory = a_directory(2)
    for number in range(4):
        directory.store(key(number), SHARED, 10, 100)
    dropped = [number for number in range(4) if readable(directory, number) is None]
    directory.delete(key(dropped[0]), SHARED)
    for number in dropped:
        directory.recall(key(number), SHARED, 500)
    assert readable(directory, dropped[0]) is None
    assert directory.expires_at_s(SPACE, block(dropped[1])) == 500
    assert directory.count(SHARED).blocks == 3


WINDOWED = PoolLayout(128, (LayerGroup(0, 256), LayerGroup(1)))


def test_the_layout_tells_windows_from_what_every_block_needs() -> None:
    directory = a_directory()
    full, window = Part(0x01000100, 1), Part(0x01000100, 0)
    directory.store(key(1, full), SHARED, 10, 100)
    directory.store(key(2, window), NODE_A, 10, 100)
    assert readable(directory, 1) == NOBODY
    directory.set_layout("pool", WINDOWED)
    assert directory.layout("pool") == WINDOWED
    assert readable(directory, 1) == Readable(True, frozenset(), windows=(NOBODY,))
    in_dram = Readable(False, frozenset({"node-a"}))
    assert readable(directory, 2) == NOBODY._replace(windows=(in_dram,))
    # A group that the engines did not tell of is needed of every block.
    directory.store(key(3, Part(0x01000100, 2)), SHARED, 10, 100)
    assert readable(directory, 1) == NOBODY._replace(windows=(NOBODY,))
