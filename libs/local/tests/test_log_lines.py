"""When, how grave, about which request: of our lines and of those of others."""

import json
import time
from datetime import datetime

import pytest

from shoal_local.log_lines import read_line

BEFORE_S = 1_700_000_000.0


def a_line(**keys):
    return json.dumps({"at": "2026-12-01T02:51:03.526+00:00", "level": "INFO", "event": "request.settled", **keys})


def local(text):
    return datetime.fromisoformat(text).timestamp()


@pytest.fixture
def far_from_utc(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_our_lines_tell_everything():
    line = read_line("gateway", a_line(request_id="abc", outcome="finished"), BEFORE_S)
    assert (line.at_s, line.level, line.request_id) == (local("2026-12-01T02:51:03.526+00:00"), "INFO", "abc")
    assert line.text == "request.settled request_id=abc outcome=finished"


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("[20477] 2026/12/01 02:51:01.088522 [INF] Starting nats-server", "2026-12-01T02:51:01.088522"),
        ("2026-12-01 02:51:01.093 UTC [20479] LOG:  starting", "2026-12-01T02:51:01.093+00:00"),
        ("[2026-12-01 02:51:01,093] LMCache INFO: x", "2026-12-01T02:51:01.093"),
        ("2026-12-01 02:51:01 x", "2026-12-01T02:51:01"),
    ],
)
def test_the_usual_ways_to_tell_the_time_are_understood(text, at, far_from_utc):
    assert read_line("nats", text, BEFORE_S).at_s == local(at)


@pytest.mark.parametrize("text", ["  a line that goes on", "INFO 12-01 02:47:50 x", "9999-99-99 99:99:99 x", "{broken"])
def test_a_line_without_a_time_belongs_to_the_one_before(text):
    assert read_line("decode", text, BEFORE_S).at_s == BEFORE_S


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("[1] 2026/12/01 02:51:01 [ERR] no", "ERROR"),
        ("[1] 2026/12/01 02:51:01 [WRN] no", "WARNING"),
        ("2026-12-01 02:51:01 UTC [7] FATAL:  no", "ERROR"),
        ("(EngineCore pid=1) WARNING 12-01 02:47:50 x", "WARNING"),
        ("(EngineCore pid=1) DEBUG 12-01 02:47:50 x", "DEBUG"),
        ("LOG:  database system is ready", "INFO"),
        (f"INFO {'x' * 200} ERROR", "INFO"),
        (a_line(level="CRITICAL"), "ERROR"),
        (a_line(level="WARNING"), "WARNING"),
    ],
)
def test_the_level_of_others_is_read_from_the_beginning_of_the_line(text, level):
    assert read_line("x", text, BEFORE_S).level == level
