"""Changes cut to the size of a message."""

import pytest

from shoal_kvindex.directory import SHARED, Namespace, ObjectKey, Part
from shoal_kvindex.directory import Level as L
from shoal_kvindex.ingest.changes import Change, Correction, Marks, Renewal, Renewals, Reports, Sign, StoreSign
from shoal_kvindex.ingest.reports import Kind, Report, ReportSource
from shoal_kvindex.ingest.split import MESSAGE_BYTES, report_bytes, split, weight
from shoal_kvindex.wire import to_bytes
from shoal_runtime.nats import MAX_PAYLOAD_BYTES

SPACE = Namespace("pool", "")
MANY = [number.to_bytes(32, "big") for number in range(15_000)]
KEYS = [ObjectKey(SPACE, block_hash, Part(0x01000100, 0)) for block_hash in MANY]


def a_report(seq: int, objects: int) -> Report:
    return Report(ReportSource("node-a", 1, seq), Kind.STORE, L.L2, True, [(key, 2**40) for key in KEYS[:objects]])


def test_a_small_change_is_one_piece() -> None:
    reports, sign = Reports([a_report(1, 10), a_report(2, 0)]), StoreSign("node-a", Sign.BEAT)
    assert list(split(reports)) == [reports]
    assert list(split(sign)) == [sign]
    assert (weight(reports), weight(sign)) == (11, 1)


@pytest.mark.parametrize(
    "change",
    [
        Reports([a_report(seq, 4_000) for seq in range(1, 8)]),
        Renewals([Renewal(SPACE, MANY, 5), Renewal(SPACE, MANY, 6)]),
        Renewals([Renewal(Namespace("p" * 512, "s" * 500 + str(n)), MANY[:1], 5) for n in range(5000)]),
        Marks([(SPACE, MANY), (SPACE, MANY)], is_for_room=True),
        Correction(SHARED, [(key, 2**40) for key in KEYS], KEYS),
    ],
    ids=lambda change: type(change).__name__,
)
def test_pieces_fit_and_are_the_whole(change: Change) -> None:
    pieces = list(split(change))
    assert len(pieces) > 1
    assert all(len(to_bytes("kvindex-1", piece)) < MAX_PAYLOAD_BYTES for piece in pieces)
    assert sum(weight(piece) - 1 for piece in pieces) == weight(change) - 1


def test_reports_stay_whole_and_in_their_order() -> None:
    reports = [a_report(seq, 4_000) for seq in (3, 1, 2)]
    pieces = [piece.reports for piece in split(Reports(reports)) if isinstance(piece, Reports)]
    assert [report.source.seq for piece in pieces for report in piece] == [1, 2, 3]


def test_what_a_report_may_take_is_an_upper_bound() -> None:
    for report in (a_report(1, 0), a_report(1, 1), a_report(1, 15_000)):
        assert len(to_bytes("", Reports([report]))) <= report_bytes(report) <= MESSAGE_BYTES
