"""`make setup` on machines that are not ours: which Python, which torch, and one sentence where it cannot work.

`deploy/setup.sh` runs for real, on a PATH where uname, df and every Python are scripts that answer as told.
"""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "deploy" / "setup.sh"
TOOLS = "awk bash cat cmp cp cut dirname du env find grep mkdir rm sed sha256sum sleep tail test touch"
GOOD = "64 glibc 2.36 whole"
OWN = "2.15.0, 2.13.0, 2.12.1"
CPU = "2.13.0+cpu, 2.12.1+cpu"

PYTHON = """#!/usr/bin/env bash
case "$1 $2" in
  "-I -c") if [ "$(cat "$0.words")" = real ]; then exec "$REAL" -I -c "$3"; else cat "$0.words"; fi ;;
  "-m venv")
    [ "$3" != --clear ] || rm -rf "$4"
    mkdir -p "$4/bin" "$4/lib"
    cp "$0" "$4/bin/python"; cp "$0.words" "$4/bin/python.words"; cp "$0" "$4/bin/pip"
    echo "command = $0 -m venv --clear $PWD/$4" > "$4/pyvenv.cfg" ;;
  "-m pip")
    echo "${0##*/} ${*:3}" >> "$CALLS"
    case "$*" in
      *"index versions"*"--index-url $INDEX"*) versions=$INDEX_HAS ;;
      *"index versions"*) versions=$OWN_HAS ;;
      *"$FAILS_AT"*) [ -z "$FAILS_AT" ] || { echo "$FAILS_WITH" >&2; exit 1; } ;;
    esac
    case "$*" in
      *"index versions"*)
        [ -n "$versions" ] || { echo "WARNING: Retrying (Retry(total=0))" >&2; exit 1; }
        printf 'torch (9.9)\\nAvailable versions: %s\\n' "$versions" ;;
      *"$WAITS_AT"*) [ -z "$WAITS_AT" ] || { trap 'exit 1' INT; sleep 30; } ;;
    esac ;;
  "-V ") echo "Python of $0" ;;
esac
"""


@dataclass
class Machine:
    """A clone of Shoal, and what the machine around it is like."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def clone(self) -> Path:
        return self.root / "a clone"

    @property
    def calls(self) -> str:
        """Every call of pip, with the name of the Python that it ran in."""
        calls = self.root / "calls"
        return calls.read_text() if calls.exists() else ""

    def has_program(self, name: str, script: str) -> None:
        program = self.root / "bin" / name
        program.write_text(script)
        program.chmod(0o755)

    def has_python(self, name: str, words: str) -> None:
        self.has_program(name, PYTHON)
        (self.root / "bin" / f"{name}.words").write_text(f"{words}\n" if words else "")

    def is_a(self, system: str, machine: str) -> None:
        self.has_program("uname", f'#!/usr/bin/env bash\n[ "$1" = -s ] && echo {system} || echo {machine}\n')

    def has_free_mib(self, mib: int) -> None:
        self.has_program("df", f"#!/usr/bin/env bash\necho Filesystem; echo disk 1 1 {mib * 1024} 1% /\n")

    def start(self, *arguments: str, **environ: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [self.clone / "deploy" / "setup.sh", *arguments],
            env={**self.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def setup(self, *arguments: str, **environ: str) -> tuple[int, str]:
        """Exit code and what was said."""
        process = self.start(*arguments, **environ)
        said, _ = process.communicate(timeout=30)
        return process.returncode, said


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Linux on x86 with room on its disk, a package index with PyPI's torch, and no Python yet."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for tool in TOOLS.split():
        found = shutil.which(tool)
        assert found, tool
        (bin_folder / tool).symlink_to(found)
    names = ("FAILS_AT", "FAILS_WITH", "WAITS_AT", "INDEX_HAS")
    environ = {"PATH": str(bin_folder), "CALLS": str(tmp_path / "calls"), "REAL": sys.executable} | dict.fromkeys(
        names, ""
    )
    environ |= {"OWN_HAS": OWN, "INDEX": "https://download.pytorch.org/whl/cpu"}
    machine = Machine(tmp_path, environ)
    machine.is_a("Linux", "x86_64")
    machine.has_free_mib(50_000)
    (machine.clone / "deploy").mkdir(parents=True)
    shutil.copy(SETUP, machine.clone / "deploy")
    for path, text in {
        "constraints.txt": "six==1.0\ntorch==2.13.0\n",
        "requirements-dev.txt": "",
        "requirements-engine.txt": "",
        "libs/a/pyproject.toml": "",
        "services/b/pyproject.toml": "",
    }.items():
        (machine.clone / path).parent.mkdir(parents=True, exist_ok=True)
        (machine.clone / path).write_text(text)
    return machine


@pytest.mark.parametrize(
    ("system", "processor", "advice"),
    [
        ("Darwin", "arm64", "on macOS start Shoal in containers: docker compose up"),
        ("MINGW64_NT-10.0", "x86_64", "inside WSL2 (wsl --install brings it), or start Shoal in containers"),
        ("FreeBSD", "amd64", "this is FreeBSD: start Shoal in containers"),
        ("Linux", "armv7l", "this machine is armv7l"),
    ],
)
def test_other_systems_are_told_what_to_do_and_nothing_is_made(
    machine: Machine, system: str, processor: str, advice: str
) -> None:
    machine.is_a(system, processor)
    machine.has_python("python3", f"3.11 {GOOD}")
    code, said = machine.setup()
    assert code == 1 and advice in said and said.count("\n") == 1
    assert not (machine.clone / ".venv").exists()


def test_arm_is_fine(machine: Machine) -> None:
    machine.is_a("Linux", "aarch64")
    machine.has_python("python3", f"3.12 {GOOD}")
    assert machine.setup()[0] == 0


@pytest.mark.parametrize(
    ("pythons", "taken"),
    [
        ({"python3": "3.12", "python3.11": "3.11"}, "python3"),
        ({"python3": "3.10", "python3.13": "3.13"}, "python3.13"),
        ({"python3": "3.14", "python3.11": "3.11", "python3.12": "3.12", "python3.13": "3.13"}, "python3.11"),
        ({"python3": "pypy3.11", "python3.13": "3.13t", "python3.12": "3.12"}, "python3.12"),
    ],
)
def test_the_first_python_that_will_do_is_taken(machine: Machine, pythons: dict[str, str], taken: str) -> None:
    for name, version in pythons.items():
        machine.has_python(name, f"{version} {GOOD}")
    code, said = machine.setup()
    assert code == 0 and f"({taken})" in said


def test_a_named_python_is_taken_or_refused_but_never_replaced(machine: Machine) -> None:
    machine.has_python("python3", f"3.11 {GOOD}")
    machine.has_python("python3.12", f"3.12 {GOOD}")
    machine.has_python("old", f"3.9 {GOOD}")
    assert "(python3.12)" in machine.setup("--plan", PYTHON="python3.12")[1]
    assert "old is Python 3.9 (64 bits)" in machine.setup("--plan", PYTHON="old")[1]
    assert "nowhere does not run" in machine.setup("--plan", PYTHON="nowhere")[1]


def test_our_own_python_would_be_taken(machine: Machine) -> None:
    machine.has_python("python3", "real")
    assert machine.setup("--plan")[0] == 0


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("", "Shoal needs Python 3.11, 3.12 or 3.13; none is here. Install one"),
        (f"3.14 {GOOD}", "python3 is Python 3.14 (64 bits). Install one"),
        ("3.11 32 glibc 2.36 whole", "python3 is Python 3.11 (32 bits). Install one"),
        (
            "3.11 64 glibc 2.28 whole",
            "glibc 2.31 or newer (Debian 11, Ubuntu 20.04, RHEL 9), not glibc 2.28: start Shoal in con",
        ),
        ("3.11 64 musl ? whole", "not musl ?: start Shoal in containers"),
        ("3.12 64 glibc 2.39 parted", "sudo apt-get install python3.12-venv, then make setup again"),
    ],
)
def test_a_python_that_will_not_do_is_explained_in_one_line(machine: Machine, words: str, advice: str) -> None:
    machine.has_python("python3", words)
    code, said = machine.setup()
    assert code == 1 and advice in said and said.count("\n") == 1


def test_pips_own_cpu_build_of_torch_comes_first(machine: Machine) -> None:
    machine.has_python("python3", f"3.11 {GOOD}")
    code, said = machine.setup(OWN_HAS=f"{OWN}, {CPU}", INDEX_HAS=CPU)
    assert code == 0 and "for the CPU" in said
    assert "torch==2.13.0+cpu\n" in machine.calls and "--index-url" not in machine.calls


def test_else_torch_comes_from_the_cpu_index_and_only_torch(machine: Machine) -> None:
    machine.has_python("python3", f"3.11 {GOOD}")
    code, said = machine.setup(INDEX_HAS=CPU)
    assert code == 0 and "from https://download.pytorch.org/whl/cpu" in said
    install = "install --no-compile -c constraints.txt torch==2.13.0+cpu --no-deps --index-url https://download.pytorch.org/whl/cpu"
    assert install in machine.calls
    assert machine.calls.count("--index-url") == 2  # the question and the answer


def test_the_cpu_index_can_be_set(machine: Machine) -> None:
    machine.has_python("python3", f"3.11 {GOOD}")
    code, _ = machine.setup(TORCH_INDEX="https://mirror/cpu", INDEX="https://mirror/cpu", INDEX_HAS="2.13.0+cpu")
    assert code == 0 and "torch==2.13.0+cpu --no-deps --index-url https://mirror/cpu" in machine.calls


@pytest.mark.parametrize("index_has", ["", "2.12.1+cpu"])
def test_else_the_build_with_cuda_is_announced_before_it_is_fetched(machine: Machine, index_has: str) -> None:
    machine.has_python("python3", f"3.11 {GOOD}")
    code, said = machine.setup(INDEX_HAS=index_has)
    assert code == 0 and "torch==2.13.0\n" in machine.calls and "+cpu" not in machine.calls
    assert said.index("3 GB to download") < said.index("1/5") and "TORCH_INDEX=" in said


def test_without_network_it_stops_at_once(machine: Machine) -> None:
    machine.has_python("python3", f"3.11 {GOOD}")
    code, said = machine.setup(OWN_HAS="")
    assert code == 1 and "pip does not reach its package index" in said and "https_proxy=" in said
    assert "install" not in machine.calls


def test_too_little_disk_is_noticed_before_anything_is_fetched(machine: Machine) -> None:
    machine.has_python("python3", f"3.11 {GOOD}")
    machine.has_free_mib(5_000)
    assert machine.setup("--plan", INDEX_HAS=CPU)[0] == 0
    code, said = machine.setup()  # the build with CUDA needs more
    assert code == 1 and "has 5000 MiB free" in said
    assert "install" not in machine.calls


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("OSError: [Errno 28] No space left on device", "The disk is full"),
        ("SSLError(CERTIFICATE_VERIFY_FAILED)\nWARNING: Retrying", "PIP_CERT="),
        ("WARNING: Retrying after ProxyError", "pip does not reach its package index"),
        ("OSError: [Errno 13] Permission denied", "belongs to another user"),
        ("ERROR: no such thing", "all that it said is in .venv/setup.log"),
    ],
)
def test_what_pip_failed_at_is_said_in_words(machine: Machine, words: str, advice: str) -> None:
    machine.has_python("python3", f"3.11 {GOOD}")
    code, said = machine.setup(FAILS_AT="-r requirements-dev.txt", FAILS_WITH=words)
    assert code == 1 and advice in said and "make setup again" in said
    assert not (machine.clone / ".venv" / "installed.txt").exists()


def test_what_stopped_midway_goes_on_and_then_only_checks(machine: Machine) -> None:
    machine.has_python("python3", f"3.11 {GOOD}")
    assert machine.setup(FAILS_AT="-r requirements-dev.txt", FAILS_WITH="cut off")[0] == 1
    packages = machine.clone / ".venv" / "lib" / "python3.11" / "site-packages"
    for name, files in {"whole.dist-info": ["METADATA", "RECORD"], "half.dist-info": ["METADATA"]}.items():
        (packages / name).mkdir(parents=True)
        for file in files:
            (packages / name / file).touch()
    code, said = machine.setup()
    assert code == 0 and "5/5" in said and "Next: make up" in said
    assert {path.name for path in packages.iterdir()} == {"whole.dist-info"}  # the other is installed again
    calls = machine.calls
    assert machine.setup() == (0, "")
    assert machine.calls == calls
    (machine.clone / "constraints.txt").write_text("torch==2.13.0\nsix==2.0\n")
    assert "Installed in" in machine.setup()[1]


def test_a_moved_clone_is_set_up_anew(machine: Machine) -> None:
    machine.has_python("python3", f"3.11 {GOOD}")
    machine.setup()
    (machine.clone / ".venv" / "of-the-old-place").touch()
    machine.clone.rename(machine.root / "moved")
    shutil.copytree(machine.root / "moved", machine.clone.parent / "a clone", symlinks=True)
    assert machine.setup() == (0, "")  # the same place again
    shutil.rmtree(machine.clone)
    (machine.root / "elsewhere").mkdir()
    moved = Machine(machine.root / "elsewhere", machine.environ)
    (machine.root / "moved").rename(moved.clone)
    assert "Installed in" in moved.setup()[1]
    assert not (moved.clone / ".venv" / "of-the-old-place").exists()


def test_settings_of_other_projects_do_not_reach_pip(machine: Machine) -> None:
    machine.has_python("python3", f"3.11 {GOOD}")
    spy = PYTHON.replace(
        '"-m pip")', '"-m pip") echo "user=$PIP_USER path=$PYTHONPATH target=$PIP_TARGET" >> "$CALLS"', 1
    )
    machine.has_program("python3", spy)
    machine.setup(PIP_USER="1", PYTHONPATH="/ros", PIP_TARGET="/elsewhere", CDPATH="/tmp")
    assert "user=0 path= target=\n" in machine.calls and "/ros" not in machine.calls


def test_ctrl_c_ends_it_and_says_that_it_goes_on(machine: Machine) -> None:
    machine.has_python("python3", f"3.11 {GOOD}")
    process = machine.start(WAITS_AT="-r requirements-dev.txt")
    assert process.stdout is not None
    said = ""
    while "3/5" not in said:
        said += process.stdout.read(1)
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=20)
    assert process.returncode == 1 and "make setup goes on where it stopped" in rest
