"""Admission is bounded on both sides and keeps its order."""

from hypothesis import given
from hypothesis import strategies as st

from shoal_policy import AdmissionPolicy, AdmissionVerdict, AdmissionView


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 60), st.integers(0, 60))
def test_verdict_follows_the_bounds(max_running: int, max_waiting: int, running: int, waiting: int) -> None:
    verdict = AdmissionPolicy(max_running, max_waiting).decide(AdmissionView(running, waiting))
    if verdict is AdmissionVerdict.ADMIT:
        assert running < max_running and waiting == 0
    elif verdict is AdmissionVerdict.WAIT:
        assert waiting < max_waiting
    else:
        assert waiting >= max_waiting


def test_nobody_overtakes_a_waiting_request() -> None:
    assert AdmissionPolicy(8, 8).decide(AdmissionView(3, 1)) is AdmissionVerdict.WAIT
