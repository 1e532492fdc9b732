"""One supervisor a home, and what a dead one left behind is ended."""

import subprocess

import pytest

from shoal_local.home import AlreadyRunning, ChildRecord, Home, HomeUnusable, Record, remove_unused_segments
from shoal_local.processes import ProcessName, boot_id, name_of

DEAD = ProcessName(pid=2**22 - 1, started_ticks=1)


def a_record(*, supervisor=DEAD, children=(), boot=None):
    return Record(boot or boot_id(), supervisor, "http://127.0.0.1:8000", "nats://127.0.0.1:4222", 1.0, list(children))


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_a_record_is_read_as_it_was_written(home, sleeper):
    child = ChildRecord("gateway", name_of(sleeper.pid), "ready", 2, 1.5)
    waiting = ChildRecord("decode", None, "waiting", 0, None)
    record = a_record(children=[child, waiting])
    with home.hold():
        home.write(record)
        assert home.read() == record
        home.forget()
        assert home.read() is None


def test_a_second_supervisor_is_refused(home, sleeper):
    with home.hold():
        home.write(a_record(supervisor=name_of(sleeper.pid)))
        with pytest.raises(AlreadyRunning), home.hold():
            pass


def test_a_home_whose_holder_has_just_begun_is_refused(home):
    with home.hold(), pytest.raises(AlreadyRunning), home.hold():
        pass


def test_a_dead_supervisor_does_not_run(home):
    assert not home.is_running(a_record())
    assert not home.is_running(None)


def test_a_supervisor_of_an_earlier_start_of_the_machine_does_not_run(home, sleeper):
    assert not home.is_running(a_record(supervisor=name_of(sleeper.pid), boot="earlier"))


def test_leftovers_of_a_dead_supervisor_are_ended_and_forgotten(home, sleeper):
    with home.hold():
        home.write(a_record(children=[ChildRecord("decode", name_of(sleeper.pid), "ready", 0, 1.0)]))
        assert home.end_leftovers() == 1
        assert sleeper.wait(timeout=5) != 0
        assert home.read() is None


def test_pids_of_an_earlier_start_of_the_machine_are_left_alone(home, sleeper):
    with home.hold():
        child = ChildRecord("decode", name_of(sleeper.pid), "ready", 0, 1.0)
        home.write(a_record(children=[child], boot="earlier"))
        assert home.end_leftovers() == 0
        assert sleeper.poll() is None


def test_only_segments_that_nobody_maps_are_removed(tmp_path):
    used, unused, other = tmp_path / "lmcache_used", tmp_path / "lmcache_unused", tmp_path / "sem.other"
    for path in (used, unused, other):
        path.write_bytes(b"x" * 4096)
    code = f"import mmap; f = open({str(used)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0); print(1, flush=True); input()"
    with subprocess.Popen(["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as mapper:
        mapper.stdout.readline()
        assert remove_unused_segments(tmp_path) == ["lmcache_unused"]
        mapper.communicate("\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lmcache_used", "sem.other"]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"1", b'{"boot": 1}', b"\xff", b'{"children": [1], "supervisor": {}}']
)
def test_a_damaged_record_is_no_record(home, text):
    home.folder.mkdir()
    (home.folder / "run.json").write_bytes(text)
    assert home.read() is None
    with home.hold():
        assert home.end_leftovers() == 0


def test_a_home_that_cannot_be_a_folder_is_refused_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        home = Home(folder)
        assert home.read() is None
        with pytest.raises(HomeUnusable, match=r"SHOAL_HOME=.* cannot be written"), home.hold():
            pass
