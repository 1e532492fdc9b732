"""Who computes which blocks now."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_kvindex.names import Namespace
from shoal_kvindex.prefixes import PendingRun, Prefixes

SPACE = Namespace("pool", "")
BLOCKS = [number.to_bytes(32, "big") for number in range(8)]
OTHER = [number.to_bytes(32, "big") for number in range(100, 108)]


def a_book(max_blocks: int = 100, longest_s: float = 60.0) -> Prefixes:
    return Prefixes(max_blocks, longest_s)


def asked(book: Prefixes, hashes: list[bytes], hit: int = 0, request_id: str = "b", now_s: float = 0.0) -> object:
    return book.pending(SPACE, hashes, hit, request_id, now_s)


def test_others_hear_who_computes_and_how_far() -> None:
    book = a_book()
    assert asked(book, BLOCKS) is None
    assert book.claim(SPACE, BLOCKS[2:5], "a", 10.0, 0.0)
    assert asked(book, BLOCKS, hit=2) == PendingRun(5, "a")
    assert asked(book, [*BLOCKS[:4], *OTHER], hit=2) == PendingRun(4, "a")
    assert book.pending(Namespace("pool", "tenant"), BLOCKS, 2, "b", 0.0) is None


def test_first_block_after_the_hit_decides() -> None:
    book = a_book()
    book.claim(SPACE, BLOCKS[2:5], "a", 10.0, 0.0)
    assert asked(book, BLOCKS, hit=1) is None
    assert asked(book, BLOCKS, hit=8) is None


def test_own_claim_is_nothing_to_wait_for() -> None:
    book = a_book()
    book.claim(SPACE, BLOCKS, "a", 10.0, 0.0)
    assert asked(book, BLOCKS, request_id="a") is None


def test_claim_ends_when_its_time_passes() -> None:
    book = a_book(longest_s=20.0)
    book.claim(SPACE, BLOCKS, "a", 10.0, 0.0)
    assert asked(book, BLOCKS, now_s=9.9) is not None
    assert asked(book, BLOCKS, now_s=10.0) is None
    assert len(book) == 0
    book.claim(SPACE, BLOCKS, "a", 1e9, 10.0)
    assert asked(book, BLOCKS, now_s=30.0) is None


def test_lapsed_claim_wants_nothing_though_nobody_asked_or_claimed_since() -> None:
    book = a_book()
    book.claim(SPACE, BLOCKS, "a", 10.0, 0.0)
    assert book.is_wanted(SPACE, BLOCKS[3], 9.9)
    assert not book.is_wanted(SPACE, BLOCKS[3], 10.0)
    assert len(book) == 0


def test_claim_ends_with_its_blocks_stored() -> None:
    book = a_book()
    book.claim(SPACE, BLOCKS[:3], "a", 10.0, 0.0)
    book.stored(SPACE, BLOCKS[1])
    assert asked(book, BLOCKS) == PendingRun(3, "a")
    book.stored(SPACE, BLOCKS[0])
    book.stored(SPACE, BLOCKS[2])
    assert asked(book, BLOCKS, hit=3) is None
    assert asked(book, BLOCKS) is None
    assert book.end("a") is None


def test_claim_ends_when_its_request_gives_up() -> None:
    book = a_book()
    book.claim(SPACE, BLOCKS, "a", 10.0, 0.0)
    book.hear(SPACE, (), "a", 0.0, 1.0)
    assert asked(book, BLOCKS, now_s=1.0) is None
    assert len(book) == 0


def test_first_claim_stays() -> None:
    book = a_book()
    book.claim(SPACE, BLOCKS[:4], "a", 10.0, 0.0)
    assert book.claim(SPACE, BLOCKS, "b", 10.0, 0.0)
    assert asked(book, BLOCKS, request_id="c") == PendingRun(4, "a")
    assert asked(book, BLOCKS, hit=4, request_id="c") == PendingRun(8, "b")
    assert not book.claim(SPACE, BLOCKS, "c", 10.0, 0.0)


def test_bound_refuses_and_lapsed_claims_make_room() -> None:
    book = a_book(max_blocks=4)
    assert book.claim(SPACE, BLOCKS[:4], "a", 0.5, 0.0)
    assert not book.claim(SPACE, OTHER[:1], "b", 10.0, 0.1)
    assert book.claim(SPACE, OTHER[:1], "b", 10.0, 0.5)


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["hear", "stored", "end"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 7),
        st.integers(0, 7),
        st.floats(0, 30),
        st.floats(0, 5),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=50)
@given(CALLS)
def test_bound_holds_and_no_block_stays_pending_for_ever(
    calls: list[tuple[str, str, int, int, float, float]],
) -> None:
    book, now_s = Prefixes(max_blocks=5, longest_s=20.0), 0.0
    for what, request_id, start, end, for_s, step_s in calls:
        now_s += step_s
        if what == "hear":
            book.hear(SPACE, BLOCKS[start:end], request_id, for_s, now_s)
            book.hear(SPACE, BLOCKS[start:end], request_id, for_s, now_s)
        elif what == "stored":
            book.stored(SPACE, BLOCKS[start])
            assert not book.is_pending(SPACE, BLOCKS[start])
        else:
            book.end(request_id)
        assert len(book) <= 5
        run = book.pending(SPACE, BLOCKS, start, "asking", now_s)
        assert run is None or (start < run.blocks <= len(BLOCKS) and run.request_id in {"a", "b", "c"})
    assert all(book.pending(SPACE, BLOCKS, hit, "asking", now_s + 20.0) is None for hit in range(8))
    book.claim(SPACE, OTHER[:5], "z", 1.0, now_s + 20.0)
    assert len(book) == 5
    for block_hash in OTHER[:5]:
        book.stored(SPACE, block_hash)
    assert len(book) == 0
