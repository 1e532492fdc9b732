"""Lines are readable on the terminal, complete in the files, and bounded."""

import io
import json
import time

import pytest

from shoal_local.console import TAIL_LINES, Console, render


@pytest.fixture
def out():
    return io.StringIO()


@pytest.fixture
def console(tmp_path, out):
    made = Console(tmp_path, is_verbose=False, out=out)
    yield made
    made.close()


def a_line(event="request.settled", level="INFO", **keys):
    return json.dumps({"at": "2026-01-01", "level": level, "event": event, "service": "gateway", **keys})


def test_an_event_is_one_short_line(console, out):
    console.take("gateway", a_line(outcome="finished", hit_tokens=128, ttft_s=0.123456, reason="two words"))
    expected = 'gateway   | request.settled outcome=finished hit_tokens=128 ttft_s=0.1235 reason="two words"\n'
    assert out.getvalue() == expected


def test_the_file_has_the_line_as_it_came(console, tmp_path):
    line = a_line(outcome="finished")
    console.take("gateway", line)
    assert (tmp_path / "gateway.log").read_text() == line + "\n"


def test_warnings_are_marked_without_colours(console, out):
    console.take("gateway", a_line("health.degraded", "WARNING", part="nats"))
    assert out.getvalue() == "gateway   | WARNING health.degraded part=nats\n"


@pytest.mark.parametrize("line", ["INFO 11-30 vllm says much", a_line("log", "INFO", message="a library"), "{broken"])
def test_chatter_of_libraries_goes_to_the_file_only(line, console, out, tmp_path):
    console.take("decode", line)
    assert out.getvalue() == ""
    assert line in (tmp_path / "decode.log").read_text()


def test_a_library_that_warns_is_shown(console, out):
    console.take("decode", a_line("log", "WARNING", message="disk"))
    assert "WARNING log message=disk" in out.getvalue()


def test_verbose_shows_everything(tmp_path, out):
    console = Console(tmp_path, is_verbose=True, out=out)
    console.take("decode", "plain text")
    console.close()
    assert "decode    | plain text" in out.getvalue()


def test_nested_keys_are_written_with_dots():
    entry = {"event": "request.settled", "prefill": {"attempts": 1, "stored": None}, "fallbacks": ["a", "b"]}
    assert render(entry) == "request.settled prefill.attempts=1 prefill.stored=None fallbacks=a,b"


def test_a_traceback_shows_its_last_line():
    entry = {"event": "task.crashed", "traceback": "Traceback\n  File x\nValueError: no\n"}
    assert render(entry) == "task.crashed ValueError: no"


def test_the_tail_is_bounded(console):
    for number in range(100):
        console.take("nats", f"line {number}")
    assert console.tail("nats", since_s=0) == [f"line {number}" for number in range(100 - TAIL_LINES, 100)]
    assert console.tail("unknown", since_s=0) == []


def test_lines_of_long_ago_explain_no_end(console):
    console.take("nats", "hours ago")
    now_s = time.monotonic()
    console.take("nats", "just now")
    assert console.tail("nats", since_s=now_s) == ["just now"]


def test_files_are_bounded(tmp_path, out):
    console = Console(tmp_path, is_verbose=False, out=out, file_bytes=1000)
    for _ in range(100):
        console.take("nats", "x" * 99)
    console.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"nats.log", "nats.log.1"}
    assert all(size <= 1000 for size in sizes.values())


def test_a_terminal_that_went_away_stops_nothing(tmp_path):
    class Gone(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    console = Console(tmp_path, is_verbose=False, out=Gone())
    console.say("hello")
    console.take("nats", "goes to the file")
    console.close()
    assert (tmp_path / "nats.log").read_text() == "goes to the file\n"
