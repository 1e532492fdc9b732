"""What an embedded system's record, folder and port say of it."""

import pytest

from shoal_local.doctor.embedded import check_gateway_port, check_home, check_processes
from shoal_local.doctor.findings import Verdict
from shoal_local.home import ChildRecord, Home, Record
from shoal_local.processes import ProcessName, boot_id
from shoal_local.settings import LocalSettings

NOBODY = ProcessName(pid=2**22 - 1, started_ticks=1)


def a_record(*children):
    return Record(boot_id(), NOBODY, "http://127.0.0.1:8000", "nats://127.0.0.1:4222", 1.0, list(children))


def a_child(**changes):
    given = {"service": "decode", "name": NOBODY, "state": "ready", "restarts": 0, "ready_after_s": 1.0}
    return ChildRecord(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({}, Verdict.OK, "all 1 run"),
        ({"state": "starting"}, Verdict.WARNING, "decode is starting"),
        ({"state": "waiting", "name": None}, Verdict.WARNING, "decode is waiting"),
        ({"state": "failed", "name": None}, Verdict.WRONG, "decode is failed"),
        ({"state": "pausing", "name": None}, Verdict.WRONG, "decode is pausing"),
        ({"restarts": 3}, Verdict.WARNING, "after 3 restarts"),
    ],
)
def test_each_process_is_judged_by_its_state(tmp_path, changes, verdict, words):
    (finding,) = check_processes(Home(tmp_path), a_record(a_child(**changes)))
    assert (finding.verdict, words in finding.found) == (verdict, True)


def test_a_home_is_free_or_was_left_or_cannot_be_used(tmp_path):
    assert check_home(Home(tmp_path / "new"), None).verdict is Verdict.OK
    left = check_home(Home(tmp_path), a_record())
    assert (left.verdict, "shoal down" in left.advice) == (Verdict.WARNING, True)
    (tmp_path / "file").write_text("")
    assert check_home(Home(tmp_path / "file" / "home"), None).verdict is Verdict.WRONG


def test_a_host_that_is_not_of_this_machine_is_told():
    finding = check_gateway_port(LocalSettings(gateway_host="192.0.2.1"), None)
    assert finding.verdict is Verdict.WRONG
    assert "SHOAL_GATEWAY_HOST" in finding.advice
