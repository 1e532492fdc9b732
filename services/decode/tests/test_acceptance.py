import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_decode.acceptance import Asked, Limits, Occupancy, Refusal, judge

LIMITS = Limits("pool", 8192, max_running_requests=4, max_cached_tokens=20_000, max_local_prefill_tokens=4096)


def asked(tokens: int = 100, pool: str = "pool", is_local_prefill: bool = False) -> Asked:
    return Asked(pool, tokens, is_local_prefill)


def test_idle_worker_takes_a_placement() -> None:
    assert judge(asked(), Occupancy(), LIMITS) is None


@pytest.mark.parametrize(
    ("placement", "occupancy", "refusal"),
    [
        (asked(pool="other"), Occupancy(), Refusal.OTHER_POOL),
        (asked(8192), Occupancy(), Refusal.TOO_LONG),
        (asked(), Occupancy(is_leaving=True), Refusal.LEAVING),
        (asked(), Occupancy(running_requests=4), Refusal.TOO_MANY_REQUESTS),
        (asked(100), Occupancy(cached_tokens=19_900), Refusal.NO_ROOM),
        (asked(1, is_local_prefill=True), Occupancy(local_prefill_tokens=4096), Refusal.NO_LOCAL_PREFILL),
    ],
)
def test_each_reason_to_refuse(placement: Asked, occupancy: Occupancy, refusal: Refusal) -> None:
    assert judge(placement, occupancy, LIMITS) is refusal


def test_reasons_that_hold_everywhere_are_told_even_by_a_full_worker() -> None:
    full = Occupancy(running_requests=4, is_leaving=True)
    assert judge(asked(9000), full, LIMITS) is Refusal.TOO_LONG
    assert judge(asked(pool="other"), full, LIMITS) is Refusal.OTHER_POOL


def test_last_token_of_context_and_room_belongs_to_the_answer() -> None:
    assert judge(asked(8191), Occupancy(), LIMITS) is None
    assert judge(asked(99), Occupancy(cached_tokens=19_900), LIMITS) is None


def test_prompt_larger_than_the_allowance_is_computed_only_alone() -> None:
    large = asked(8000, is_local_prefill=True)
    assert judge(large, Occupancy(), LIMITS) is None
    assert judge(large, Occupancy(local_prefill_tokens=1), LIMITS) is Refusal.NO_LOCAL_PREFILL


def test_allowance_of_zero_refuses_every_local_prefill() -> None:
    limits = Limits("pool", 8192, 4, 20_000, max_local_prefill_tokens=0)
    assert judge(asked(1, is_local_prefill=True), Occupancy(), limits) is Refusal.NO_LOCAL_PREFILL
    assert judge(asked(1), Occupancy(), limits) is None


@given(tokens=st.integers(1, 9000), running=st.integers(0, 6), cached=st.integers(0, 25_000), is_local=st.booleans())
def test_what_is_taken_never_passes_a_limit(tokens: int, running: int, cached: int, is_local: bool) -> None:
    if judge(asked(tokens, is_local_prefill=is_local), Occupancy(running, cached), LIMITS) is None:
        assert running + 1 <= LIMITS.max_running_requests
        assert cached + tokens + 1 <= LIMITS.max_cached_tokens
        assert tokens + 1 <= LIMITS.max_context_tokens
