"""Processes are named so that a reused pid is never signalled, and a family is found when its leader is dead."""

import os
import subprocess
import sys
import time

import pytest

from shoal_local.processes import (
    ProcessName,
    boot_id,
    end_families,
    family,
    is_alive,
    memory_bytes,
    name_of,
)

SLEEP = ("sleep", "60")


@pytest.fixture
def started():
    """Starts leaders of their own groups; ends them afterwards."""
    processes = []

    def start(*argv):
        process = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        subprocess.run(["pkill", "-KILL", "-g", str(process.pid)], check=False)
        process.wait()
        process.stdout.close()


def test_a_living_process_has_a_name_and_a_dead_one_has_none(started):
    process = started(*SLEEP)
    name = name_of(process.pid)
    assert name is not None
    assert is_alive(name)
    process.kill()
    process.wait()
    assert name_of(process.pid) is None


def test_a_process_that_was_not_reaped_counts_as_dead(started):
    process = started("true")
    deadline = time.monotonic() + 5
    while name_of(process.pid) is not None and time.monotonic() < deadline:
        os.sched_yield()
    assert name_of(process.pid) is None


def test_a_pid_that_belongs_to_somebody_else_now_is_left_alone(started):
    process = started(*SLEEP)
    name = name_of(process.pid)
    earlier = ProcessName(name.pid, name.started_ticks - 1)
    assert not is_alive(earlier)
    assert family(earlier) == []
    assert end_families([earlier], grace_s=0.0) == 0
    assert process.poll() is None


def test_the_family_outlives_its_leader_and_is_found(started):
    leader = started("sh", "-c", "sleep 60 & echo $!; exec sleep 60")
    child_pid = int(leader.stdout.readline())
    name = name_of(leader.pid)
    assert {member.pid for member in family(name)} == {leader.pid, child_pid}
    leader.kill()
    leader.wait()
    assert [member.pid for member in family(name)] == [child_pid]
    assert end_families([name], grace_s=2.0) == 1
    assert family(name) == []


def test_a_child_with_a_session_of_its_own_belongs_to_the_family(started):
    leader = started("sh", "-c", "setsid sleep 60 & echo $!; exec sleep 60")
    child_pid = int(leader.stdout.readline())
    assert child_pid in {member.pid for member in family(name_of(leader.pid))}
    end_families([name_of(leader.pid)], grace_s=2.0)


def test_what_ignores_the_request_is_ended_by_force(started):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    process = started(sys.executable, "-c", code)
    process.stdout.readline()
    end_families([name_of(process.pid)], grace_s=0.1)
    assert process.wait(timeout=5) == -9


def test_memory_of_processes_is_known_and_of_dead_ones_zero(started):
    process = started(*SLEEP)
    name = name_of(process.pid)
    assert memory_bytes([name_of(os.getpid())]) > 5_000_000
    process.kill()
    process.wait()
    assert memory_bytes([name]) == 0


def test_boot_id_is_stable():
    assert boot_id() == boot_id() != ""
