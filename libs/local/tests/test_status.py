"""What is looked at, and what a program gets of it. The page itself: test_fleet_table.py, tests/e2e."""

import json
import os

import pytest

from shoal_local.fleet_view import FleetView, InstanceView
from shoal_local.home import ChildRecord, Home, Record
from shoal_local.process_table import process_table
from shoal_local.processes import boot_id, name_of
from shoal_local.status import NOTHING_RUNS, Subject, as_json, show_status
from shoal_local.terminal import as_text


@pytest.fixture
def home(tmp_path):
    """In which this very process supervises one child that is ready and one that is not there."""
    made = Home(tmp_path)
    own = name_of(os.getpid())
    children = [ChildRecord("nats", own, "ready", 2, 0.5), ChildRecord("decode", None, "pausing", 1, None)]
    made.write(Record(boot_id(), own, "http://127.0.0.1:8000", "nats://127.0.0.1:4222", 1_700_000_000.0, children))
    return made


def test_a_running_home_is_found_by_its_record(home):
    subject = Subject(home, "")
    assert subject.current_nats_url() == "nats://127.0.0.1:4222"
    assert subject.record().gateway_url == "http://127.0.0.1:8000"


def test_a_system_elsewhere_has_no_processes_here(home):
    subject = Subject(home, "nats://other:4222")
    assert (subject.current_nats_url(), subject.record()) == ("nats://other:4222", None)


def test_nothing_runs(tmp_path, capsys):
    assert show_status(Subject(Home(tmp_path), ""), is_json=False, every_s=None) == NOTHING_RUNS
    assert "shoal up" in capsys.readouterr().out


def test_processes_are_a_table_with_their_sum(home):
    lines = as_text(process_table(home.read())).splitlines()
    assert lines[0].split() == ["process", "state", "pid", "ready", "after", "restarts", "memory"]
    assert lines[1].split()[:6] == ["nats", "ready", str(os.getpid()), "0.5", "s", "2"]
    assert lines[2].split() == ["decode", "pausing", "1", "0", "MiB"]
    assert [line.split()[0] for line in lines[3:]] == ["supervisor", "all"]


def test_programs_get_numbers_and_null_for_what_is_unknown(home):
    instance = InstanceView("gateway", "gateway-1", "", True, False, "", 1.0, "", None, None, None)
    told = json.loads(json.dumps(as_json(home.read(), FleetView((instance,), None, ()))))
    assert (told["home"]["processes"][0]["service"], told["home"]["processes"][0]["restarts"]) == ("nats", 2)
    assert (told["instances"][0]["instance_id"], told["instances"][0]["load"]) == ("gateway-1", None)
    assert (told["queues"], told["overviews"]) == (None, [])
    assert as_json(None, None, "away") == {
        "reason": "away",
        "home": None,
        "instances": None,
        "queues": None,
        "overviews": None,
    }
