"""Waiting for what another request computes never costs more than computing it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_policy import UNKNOWN_PACE, AffinityPolicy, PrefillPace
from shoal_policy.affinity import SPREAD_FACTOR

POLICY = AffinityPolicy(assumed_tokens_per_s=1000.0, max_wait_s=30.0, max_claim_s=60.0)
JOBS = st.tuples(st.integers(1, 10**6), st.floats(1e-4, 1e3), st.floats(0, 1e2))


def measured(*jobs: tuple[int, float, float]) -> PrefillPace:
    pace = UNKNOWN_PACE
    for tokens, compute_s, overhead_s in jobs:
        pace = pace.after(tokens, compute_s, overhead_s)
    return pace


def test_setting_holds_until_a_job_was_measured() -> None:
    assert POLICY.wait_s(3000, UNKNOWN_PACE) == 4.5
    assert POLICY.claim_s(3000, UNKNOWN_PACE) == 7.0
    assert POLICY.wait_s(3000, measured((500, 1.0, 0.0))) == 9.0


def test_queue_and_handoff_are_part_of_what_computing_takes() -> None:
    assert POLICY.wait_s(1000, measured((1000, 0.1, 0.4))) == pytest.approx(0.75)


def test_short_jobs_do_not_decide_the_speed() -> None:
    pace = measured((10_000, 1.0, 0.0), (1, 0.01, 0.0))
    assert POLICY.compute_s(10_000, pace) == pytest.approx(1.0, rel=0.02)


def test_pace_follows_a_change() -> None:
    pace = measured(*[(1000, 1.0, 0.0)] * 20, *[(1000, 0.1, 0.0)] * 40)
    assert POLICY.compute_s(1000, pace) == pytest.approx(0.1, rel=0.15)


@settings(deadline=None, max_examples=50)
@given(st.lists(JOBS, max_size=20), st.integers(0, 10**6))
def test_wait_is_at_most_what_computing_may_take_and_bounded(jobs: list[tuple[int, float, float]], tokens: int) -> None:
    pace = measured(*jobs)
    wait_s = POLICY.wait_s(tokens, pace)
    assert 0 <= wait_s <= min(SPREAD_FACTOR * POLICY.compute_s(tokens, pace), POLICY.max_wait_s)
    assert wait_s <= POLICY.claim_s(tokens, pace) <= POLICY.max_claim_s
