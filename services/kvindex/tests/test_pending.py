"""Changes that wait for Postgres."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_kvindex.directory import SHARED, Level, Namespace, ObjectKey, Part, Place
from shoal_kvindex.ingest.gate import Cursor
from shoal_kvindex.store.pending import PendingChanges

SPACE = Namespace("pool", "")
NODE_A = Place(Level.L1, "node-a")


def key(number: int) -> ObjectKey:
    return ObjectKey(SPACE, number.to_bytes(32, "big"), Part(0x01000100, 0))


def test_the_last_word_on_an_object_wins() -> None:
    pending = PendingChanges(100)
    pending.object_stored(key(1), NODE_A, 10, 500)
    pending.object_deleted(key(1), NODE_A)
    assert pending.sizes == {(key(1), NODE_A): None}


def test_dropping_a_place_forgets_what_waits_for_it_and_keeps_what_comes_after() -> None:
    pending = PendingChanges(100)
    pending.object_stored(key(1), NODE_A, 10, 500)
    pending.object_stored(key(1), SHARED, 10, 500)
    pending.place_dropped(NODE_A)
    pending.object_stored(key(2), NODE_A, 10, 500)
    assert set(pending.sizes) == {(key(1), SHARED), (key(2), NODE_A)}
    assert pending.dropped_places == {NODE_A}


def test_overflow_is_counted_and_never_leaves_a_dram_copy_too_much() -> None:
    pending = PendingChanges(2)
    pending.object_stored(key(1), NODE_A, 10, 500)
    pending.object_deleted(key(2), NODE_A)  # no room: the durable copy of 2 must not stay
    pending.object_deleted(key(3), SHARED)  # no room: costs a recompute at worst
    pending.block_renewed(SPACE, key(4).block_hash, 900)
    assert pending.overflowed_changes == 3
    assert pending.dropped_places == {NODE_A}
    pending.object_deleted(key(1), NODE_A)  # waits already, so it always has room
    assert pending.sizes == {(key(1), NODE_A): None}


CHANGES = st.lists(
    st.tuples(st.sampled_from(["store", "delete", "drop"]), st.integers(0, 3), st.sampled_from([NODE_A, SHARED])),
    max_size=20,
)


def tell(pending: PendingChanges, changes: list[tuple[str, int, Place]]) -> PendingChanges:
    for verb, number, place in changes:
        if verb == "store":
            pending.object_stored(key(number), place, 10, 500 + number)
        elif verb == "delete":
            pending.object_deleted(key(number), place)
        elif place is NODE_A:
            pending.place_dropped(place)
    return pending


@settings(deadline=None, max_examples=50)
@given(CHANGES, CHANGES)
def test_joining_a_failed_write_with_later_changes_equals_one_write(
    earlier: list[tuple[str, int, Place]], later: list[tuple[str, int, Place]]
) -> None:
    joined = tell(PendingChanges(1000), earlier)
    joined.followed_by(tell(PendingChanges(1000), later))
    whole = tell(PendingChanges(1000), earlier + later)
    assert (joined.sizes, joined.dropped_places, joined.expiries) == (whole.sizes, whole.dropped_places, whole.expiries)


def test_cursors_go_with_the_changes() -> None:
    pending, later = PendingChanges(10), PendingChanges(10)
    pending.cursor_moved("node-a", 1, 5)
    later.cursor_moved("node-a", 1, 6)
    pending.followed_by(later)
    assert pending.cursors == {"node-a": Cursor(1, 6)}
    assert not pending.is_empty
