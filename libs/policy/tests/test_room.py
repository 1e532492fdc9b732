"""Room on the shared level: nothing below the high mark, down to the low mark above it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_policy import RoomPolicy

POLICY = RoomPolicy(high=0.9, low=0.8)


@pytest.mark.parametrize(
    ("used_bytes", "leaving_bytes", "capacity_bytes", "evicted_bytes"),
    [
        (900, 0, 1000, 0),
        (901, 0, 1000, 101),
        (1500, 0, 1000, 700),
        (950, 60, 1000, 0),
        (2000, 1000, 1000, 200),
        (10**15, 0, None, 0),
    ],
)
def test_above_the_high_mark_it_goes_down_to_the_low_one(
    used_bytes: int, leaving_bytes: int, capacity_bytes: int | None, evicted_bytes: int
) -> None:
    assert POLICY.bytes_to_evict(used_bytes, leaving_bytes, capacity_bytes) == evicted_bytes


@given(used=st.integers(0, 10**15), capacity=st.integers(1, 10**15))
def test_what_was_evicted_once_is_enough(used: int, capacity: int) -> None:
    evicted = POLICY.bytes_to_evict(used, 0, capacity)
    assert 0 <= evicted <= used
    assert POLICY.bytes_to_evict(used, evicted, capacity) == 0


@pytest.mark.parametrize(("high", "low"), [(0.8, 0.8), (1.1, 0.5), (0.5, 0.0), (0.5, 0.6)])
def test_marks_out_of_order_are_refused(high: float, low: float) -> None:
    with pytest.raises(ValueError, match="low"):
        RoomPolicy(high, low)
