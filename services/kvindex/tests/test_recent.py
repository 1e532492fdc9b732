"""What was asked of late, within a bound, and which requests began alike."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_kvblocks import block_hashes
from shoal_kvindex.names import Namespace
from shoal_kvindex.recent import RECORD_BYTES, AskedPrompt, RecentPrompts, Relative, common_blocks

SPACE = Namespace("pool", "")


def chain(*words: int) -> bytes:
    """Hashes of a prompt with a block a word."""
    return block_hashes(b"".join(word.to_bytes(4, "little") for word in words), 1)


def asked(request_id: str, *words: int, space: Namespace = SPACE) -> AskedPrompt:
    return AskedPrompt(request_id, space, chain(*words), len(words), 0, 1_800_000_000)


def test_what_a_request_asked_last_is_what_is_known() -> None:
    recent = RecentPrompts(10_000)
    recent.remember(asked("a", 1, 2))
    recent.remember(asked("a", 1, 2, 3))
    assert recent.get("a") == asked("a", 1, 2, 3)
    assert recent.get("b") is None
    assert len(recent) == 1


def test_bound_pushes_out_who_asked_longest_ago() -> None:
    recent = RecentPrompts(3 * (RECORD_BYTES + 2 * 32))
    for name in "abcd":
        recent.remember(asked(name, 1, 2))
    assert [recent.get(name) is not None for name in "abcd"] == [False, True, True, True]
    recent.settled("d", chain(1, 2, 3))
    assert recent.get("b") is None
    assert recent.held_bytes <= 3 * (RECORD_BYTES + 2 * 32)
    assert len(RecentPrompts(0)) == 0


def test_no_memory_is_allowed() -> None:
    recent = RecentPrompts(0)
    recent.remember(asked("a", 1))
    assert (len(recent), recent.held_bytes) == (0, 0)


def test_only_earlier_requests_that_begin_alike_are_relatives() -> None:
    recent = RecentPrompts(100_000)
    for other in (
        asked("same", 1, 2, 3),
        asked("other", 1, 2, 9, 9),
        asked("shorter", 1, 2),
        asked("stranger", 8, 2, 3),
        asked("tenant", 1, 2, 3, space=Namespace("pool", "tenant")),
        asked("me", 1, 2, 3),
        asked("later", 1, 2, 3),
    ):
        recent.remember(other)
    assert recent.relatives(asked("me", 1, 2, 3)) == [
        Relative("same", 3, is_other=False),
        Relative("other", 2, is_other=True),
        Relative("shorter", 2, is_other=False),
    ]


def test_answer_of_a_settled_request_is_part_of_what_is_compared() -> None:
    recent = RecentPrompts(100_000)
    recent.remember(asked("turn", 1, 2))
    recent.settled("turn", chain(1, 2, 3, 4))
    recent.settled("turn", chain(7, 7, 7, 7, 7, 7))  # not what was asked
    recent.settled("unknown", chain(1))
    recent.remember(asked("next", 1, 2, 3, 5, 6))
    assert recent.relatives(asked("next", 1, 2, 3, 5, 6)) == [Relative("turn", 3, is_other=True)]
    known = recent.get("turn")
    assert known is not None
    assert known.whole_blocks == 2


WORDS = st.lists(st.integers(0, 1), max_size=12)


@settings(deadline=None, max_examples=50)
@given(WORDS, WORDS)
def test_common_blocks_are_the_common_prefix(one: list[int], other: list[int]) -> None:
    equal = [a == b for a, b in zip(one, other, strict=False)]
    expected = equal.index(False) if False in equal else len(equal)
    assert common_blocks(chain(*one), chain(*other)) == expected


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9), st.booleans()), max_size=40))
def test_bytes_are_accounted(calls: list[tuple[str, int, bool]]) -> None:
    recent = RecentPrompts(4000)
    for name, length, is_settled in calls:
        if is_settled:
            recent.settled(name, chain(*range(length + 3)))
        else:
            recent.remember(asked(name, *range(length)))
        known = [found for found in map(recent.get, "abcd") if found is not None]
        assert recent.held_bytes == sum(found.weight_bytes for found in known) <= 4000
