"""Which reports are believed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_kvindex.ingest.gate import Cursor, ReportGate, Verdict


@pytest.mark.parametrize(
    ("incarnation", "seq", "verdict"),
    [
        (5, 11, Verdict.ADMITTED),
        (5, 12, Verdict.AFTER_GAP),
        (5, 10, Verdict.DUPLICATE),
        (5, 3, Verdict.DUPLICATE),
        (4, 11, Verdict.STALE),
        (6, 1, Verdict.RESTARTED),
        (6, 4, Verdict.RESTARTED),
    ],
)
def test_verdict_against_a_cursor_at_life_5_report_10(incarnation: int, seq: int, verdict: Verdict) -> None:
    gate = ReportGate()
    gate.restore({"node-a": Cursor(5, 10)})
    assert gate.admit("node-a", incarnation, seq) is verdict


def test_an_unknown_server_is_complete_only_from_its_first_report() -> None:
    gate = ReportGate()
    assert gate.admit("node-a", 1, 1) is Verdict.ADMITTED
    assert gate.admit("node-b", 1, 7) is Verdict.AFTER_GAP
    assert gate.admit("node-b", 1, 8) is Verdict.ADMITTED


def test_stale_incarnation_is_fenced_and_does_not_move_the_cursor() -> None:
    gate = ReportGate()
    gate.restore({"node-a": Cursor(5, 10)})
    gate.admit("node-a", 4, 99)
    assert gate.admit("node-a", 5, 11) is Verdict.ADMITTED


def test_a_gap_of_one_server_does_not_touch_another() -> None:
    gate = ReportGate()
    gate.restore({"node-a": Cursor(5, 10), "node-b": Cursor(5, 10)})
    gate.admit("node-a", 5, 20)
    assert gate.admit("node-b", 5, 11) is Verdict.ADMITTED


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), max_size=30))
def test_each_number_is_admitted_once_a_life_and_the_cursor_only_grows(reports: list[tuple[int, int]]) -> None:
    gate = ReportGate()
    admitted = [report for report in reports if gate.admit("node-a", *report).is_admitted]
    assert admitted == sorted(set(admitted))
