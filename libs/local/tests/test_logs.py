"""The logs of a home: merged by time, filtered, followed across the turning over of a file."""

import json

import pytest

from shoal_local.home import Home
from shoal_local.log_lines import LogLine
from shoal_local.logs import LogFile, LogFilter, show_logs, shown


def a_line(second, event="it.happened", level="INFO", **keys):
    return json.dumps({"at": f"2026-12-01T00:00:{second:02}+00:00", "level": level, "event": event, **keys}) + "\n"


@pytest.fixture
def home(tmp_path):
    made = Home(tmp_path)
    made.logs.mkdir()
    return made


def events(printed):
    return [line.split("| ")[1] for line in printed.splitlines()]


def test_lines_of_several_processes_are_merged_by_time(home, capsys):
    (home.logs / "a.log").write_text(a_line(1, "a.one") + a_line(3, "a.three"))
    (home.logs / "b.log").write_text(a_line(2, "b.two") + "  goes on\n" + a_line(4, "b.four"))
    assert show_logs(home, [], LogFilter(), is_following=False) == 0
    assert events(capsys.readouterr().out) == ["a.one", "b.two", "  goes on", "a.three", "b.four"]


def test_only_the_named_ones_are_shown(home, capsys):
    for name in "abc":
        (home.logs / f"{name}.log").write_text(a_line(1, f"{name}.one"))
    assert show_logs(home, ["a", "c"], LogFilter(), is_following=False) == 0
    assert events(capsys.readouterr().out) == ["a.one", "c.one"]


def test_the_file_before_comes_first(home, capsys):
    (home.logs / "a.log.1").write_text(a_line(1, "a.old"))
    (home.logs / "a.log").write_text(a_line(2, "a.new"))
    show_logs(home, ["a"], LogFilter(), is_following=False)
    assert events(capsys.readouterr().out) == ["a.old", "a.new"]


def test_an_unknown_name_is_answered_with_those_that_there_are(home, capsys):
    (home.logs / "gateway.log").write_text("")
    assert show_logs(home, ["gatway"], LogFilter(), is_following=False) == 1
    assert "No log of gatway" in (said := capsys.readouterr().out)
    assert "there are: gateway" in said


def test_no_logs_at_all_names_the_way_for_containers(tmp_path, capsys):
    assert show_logs(Home(tmp_path), [], LogFilter(), is_following=False) == 1
    assert "docker compose logs" in capsys.readouterr().out


def test_of_one_request_and_of_a_level(home, capsys):
    (home.logs / "a.log").write_text(
        a_line(1, "a.one", request_id="r1") + a_line(2, "a.two", "WARNING", request_id="r1") + a_line(3, "a.three")
    )
    show_logs(home, [], LogFilter(request_id="r1"), is_following=False)
    show_logs(home, [], LogFilter(least_level="WARNING"), is_following=False)
    assert events(capsys.readouterr().out) == [
        "a.one request_id=r1", "WARNING a.two request_id=r1", "WARNING a.two request_id=r1",
    ]  # fmt: skip


@pytest.mark.parametrize(("level", "is_wanted"), [("ERROR", True), ("WARNING", True), ("INFO", False), ("ODD", False)])
def test_a_level_wants_the_graver_ones_too(level, is_wanted):
    assert LogFilter(least_level="WARNING").wants(LogLine("a", 0.0, level, "x")) is is_wanted


def test_a_line_is_read_once_and_only_when_it_is_whole(home):
    path = home.logs / "a.log"
    path.write_text("first\nhalf")
    with LogFile(home.logs, "a") as log:
        assert [line.text for line in log.read()] == ["first"]
        assert list(log.read()) == []
        with path.open("a") as file:
            file.write(" and half\nnext\n")
        assert [line.text for line in log.read()] == ["half and half", "next"]


def test_following_goes_on_in_the_file_that_took_its_place(home):
    path = home.logs / "a.log"
    path.write_text("first\n")
    with LogFile(home.logs, "a") as log:
        list(log.read())
        with path.open("a") as file:
            file.write("last of the old\n")
        path.rename(home.logs / "a.log.1")
        assert [line.text for line in log.read()] == ["last of the old"]
        path.write_text("first of the new\n")
        assert [line.text for line in log.read()] == ["first of the new"]


def test_the_level_stands_in_words_where_it_is_not_the_usual_one():
    assert shown(LogLine("gateway", 0.0, "INFO", "x")).plain.endswith("gateway   | x")
    assert shown(LogLine("gateway", 0.0, "ERROR", "x")).plain.endswith("gateway   | ERROR x")
