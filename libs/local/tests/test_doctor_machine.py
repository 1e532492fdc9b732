"""Each lack of a machine is found and told with its remedy; what could not be read is never called fine."""

from pathlib import Path

import pytest

from shoal_local.doctor.embedded import check_disk, existing, needs_of
from shoal_local.doctor.findings import Verdict
from shoal_local.doctor.machine import (
    GIB,
    MIB,
    Machine,
    Room,
    available_bytes,
    check_memory,
    check_open_files,
    check_processor,
    check_python,
    check_shared_memory,
)
from shoal_local.settings import LocalSettings


def a_machine(**changes):
    given = {
        "system": "Linux",
        "architecture": "x86_64",
        "python": (3, 12, 4),
        "cpu_flags": frozenset({"avx2"}),
        "available_bytes": 16 * GIB,
        "shared_memory": Room(8 * GIB, 8 * GIB),
        "unused_segments": (),
        "open_files": (4096, 1 << 20),
    }
    return Machine(**(given | changes))


@pytest.mark.parametrize(
    ("python", "verdict"),
    [
        ((3, 10, 9), Verdict.WRONG),
        ((3, 11, 0), Verdict.OK),
        ((3, 13, 9), Verdict.OK),
        ((3, 14, 0), Verdict.WRONG),
    ],
)
def test_pythons_that_the_engines_have_are_right(python, verdict):
    assert check_python(a_machine(python=python)).verdict is verdict


def test_another_system_is_told_what_to_use():
    finding = check_python(a_machine(system="Darwin"))
    assert finding.verdict is Verdict.WRONG
    assert "container" in finding.advice


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"cpu_flags": frozenset({"avx2"})}, Verdict.OK),
        ({"cpu_flags": frozenset({"avx512f", "avx512_bf16"})}, Verdict.OK),
        ({"cpu_flags": frozenset({"avx"})}, Verdict.WRONG),
        ({"cpu_flags": frozenset()}, Verdict.UNKNOWN),
        ({"cpu_flags": frozenset(), "architecture": "aarch64"}, Verdict.OK),
    ],
)
def test_kernels_need_their_instructions(changes, verdict):
    assert check_processor(a_machine(**changes)).verdict is verdict


def test_a_start_needs_its_memory_and_a_running_system_some_left():
    needed = 7 * GIB
    assert check_memory(a_machine(), needed, is_running=False).verdict is Verdict.OK
    small = check_memory(a_machine(available_bytes=2 * GIB), needed, is_running=False)
    assert small.verdict is Verdict.WRONG
    assert "2.0 GiB available, a start needs about 7.0 GiB" in small.found
    assert "SHOAL_STORE_L1_GIB" in small.advice
    assert check_memory(a_machine(available_bytes=2 * GIB), needed, is_running=True).verdict is Verdict.OK
    assert check_memory(a_machine(available_bytes=99 * MIB), needed, is_running=True).verdict is Verdict.WRONG
    assert check_memory(a_machine(available_bytes=None), needed, is_running=True).verdict is Verdict.UNKNOWN


def test_the_limit_of_a_container_counts_when_it_is_lower(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert available_bytes(tmp_path, tmp_path) == 8000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_bytes(tmp_path, tmp_path) == 8000 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 300\n")
    assert available_bytes(tmp_path, tmp_path) == 5000 - 1000 + 300


def test_a_model_takes_memory_twice_and_windows_take_shared_memory():
    settings = LocalSettings(store_l1_gib=1.0)
    plain = needs_of(settings, weights_bytes=100 * MIB, kv_bytes=512 * MIB, has_windows=False)
    larger = needs_of(settings, weights_bytes=600 * MIB, kv_bytes=512 * MIB, has_windows=True)
    assert larger.memory_bytes - plain.memory_bytes == 2 * 2 * 500 * MIB
    assert (plain.shared_memory_bytes, larger.shared_memory_bytes) == (0, GIB)
    scripted = needs_of(LocalSettings(engine_kind="scripted"), weights_bytes=0, kv_bytes=0, has_windows=True)
    assert scripted.memory_bytes < plain.memory_bytes / 3


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (None, "is not there"),
        (Room(32 * MIB, 32 * MIB), "64.0 MiB are needed"),
        (Room(8 * GIB, 1 * MIB), "1.0 MiB left"),
    ],
)
def test_shared_memory_that_is_too_small_is_told(room, words):
    finding = check_shared_memory(a_machine(shared_memory=room), 0)
    assert finding.verdict is Verdict.WRONG
    assert words in finding.found


def test_shared_memory_must_hold_the_kv_that_the_store_moves():
    finding = check_shared_memory(a_machine(shared_memory=Room(512 * MIB, 512 * MIB)), GIB)
    assert finding.verdict is Verdict.WRONG
    assert "remount,size=1088M" in finding.advice
    assert "--shm-size" in finding.advice


def test_leftovers_in_shared_memory_are_told(tmp_path):
    segment = tmp_path / "lmcache_kv_1"
    segment.write_bytes(bytes(8192))
    finding = check_shared_memory(a_machine(unused_segments=(segment,)), 0)
    assert finding.verdict is Verdict.WARNING
    assert "1 segment" in finding.found
    assert "shoal down" in finding.advice


@pytest.mark.parametrize(
    ("limits", "words"), [((256, 1 << 20), "ulimit -n 4096"), ((256, 512), "limits.conf"), ((1024, 1024), "")]
)
def test_too_few_open_files_are_told_as_they_can_be_raised(limits, words):
    finding = check_open_files(a_machine(open_files=limits))
    assert (finding.verdict is Verdict.WRONG, words in finding.advice) == (bool(words), True)


def test_a_disk_that_fills_up_is_told_once_for_all_that_lies_on_it(tmp_path):
    folders = {"SHOAL_HOME": tmp_path / "home", "SHOAL_MODELS_DIR": tmp_path / "models" / "deep"}
    for free, verdict in ((99 * MIB, Verdict.WRONG), (GIB, Verdict.WARNING), (50 * GIB, Verdict.OK)):
        (finding,) = check_disk(folders, lambda _, free=free: Room(100 * GIB, free))
        assert finding.verdict is verdict
        assert f"SHOAL_HOME and SHOAL_MODELS_DIR ({tmp_path})" in finding.found


def test_folders_that_are_not_there_yet_are_those_above_them(tmp_path):
    assert existing(tmp_path / "a" / "b") == tmp_path
    assert existing(Path("/")) == Path("/")
