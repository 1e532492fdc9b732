"""What reports do to the directory."""

import pytest

from shoal_kvindex.directory import SHARED, Level, Namespace, ObjectKey, Part, Place, Readable
from shoal_kvindex.ingest.gate import Cursor, Verdict
from shoal_kvindex.ingest.reports import Fence, Kind, Report, ReportSource
from shoal_kvindex.service import Domain
from shoal_kvindex.store.pending import PendingChanges

SPACE = Namespace("pool", "")
BLOCK = bytes(31) + b"\1"
KEY = ObjectKey(SPACE, BLOCK, Part(0x01000100, 0))
L1, L2 = Level.L1, Level.L2


def report(
    seq: int, kind: Kind = Kind.STORE, level: Level = L1, *, incarnation: int = 1, instance_id: str = "node-a"
) -> Report:
    return Report(ReportSource(instance_id, incarnation, seq), kind, level, level is L2, [(KEY, 10)])


def readable(domain: Domain) -> Readable | None:
    return next(domain.directory.readable_run(SPACE, [BLOCK]), None)


def test_reports_of_one_delivery_are_applied_in_their_order_not_in_that_of_the_list(domain: Domain) -> None:
    domain.ingest.apply([report(3), report(1), report(2, Kind.DELETE)])
    assert readable(domain) == Readable(False, frozenset({"node-a"}))


def test_access_and_config_create_nothing_and_move_the_cursor(domain: Domain, journal: PendingChanges) -> None:
    summary = domain.ingest.apply([report(1, Kind.OTHER), report(2, Kind.OTHER)])
    assert summary.verdicts[Verdict.ADMITTED] == 2
    assert readable(domain) is None
    assert journal.cursors == {"node-a": Cursor(1, 2)}


@pytest.mark.parametrize(("seq", "incarnation", "fence"), [(9, 1, Fence.GAP), (1, 2, Fence.RESTARTED)])
def test_a_gap_or_a_new_life_drops_dram_copies_and_keeps_shared_ones(
    domain: Domain, journal: PendingChanges, seq: int, incarnation: int, fence: Fence
) -> None:
    domain.ingest.apply([report(1), report(2, level=L2), report(1, instance_id="node-b")])
    summary = domain.ingest.apply([report(seq, Kind.OTHER, incarnation=incarnation)])
    assert summary.fences == [("node-a", fence)]
    assert readable(domain) == Readable(True, frozenset({"node-b"}))
    assert journal.dropped_places == {Place(L1, "node-a")}


def test_the_report_that_shows_the_gap_is_itself_believed(domain: Domain) -> None:
    domain.ingest.apply([report(5)])
    assert readable(domain) == Readable(False, frozenset({"node-a"}))


def test_a_stale_report_changes_nothing(domain: Domain) -> None:
    domain.ingest.apply([report(1, incarnation=2)])
    summary = domain.ingest.apply([report(2, Kind.DELETE, incarnation=1)])
    assert summary.verdicts == {Verdict.STALE: 1}
    assert readable(domain) is not None


def test_any_server_may_report_the_delete_of_a_shared_copy(domain: Domain) -> None:
    domain.ingest.apply([report(1, level=L2), report(1, Kind.DELETE, L2, instance_id="node-b")])
    assert readable(domain) is None


def test_a_disk_of_one_node_is_counted_and_not_tracked(domain: Domain) -> None:
    unshared = Report(ReportSource("node-a", 1, 1), Kind.STORE, L2, False, [(KEY, 10)])
    assert domain.ingest.apply([unshared]).unshared_objects == 1
    assert readable(domain) is None


def test_a_temporary_copy_for_a_load_leaves_the_shared_one(domain: Domain, journal: PendingChanges) -> None:
    domain.ingest.apply([report(1, level=L2), report(2), report(3, Kind.DELETE)])
    assert readable(domain) == Readable(True, frozenset())
    assert journal.sizes == {(KEY, SHARED): 10, (KEY, Place(L1, "node-a")): None}
