"""What people read is short, exact, and says when something is unknown."""

from pathlib import Path

import pytest

from shoal_local.wording import COLUMNS, bar, counted, paragraph, share, shown_path, size, span


@pytest.mark.parametrize(
    ("count_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (41 * 2**30, "41.0 GiB"), (2**61, "2048.0 PiB")],
)
def test_sizes_take_the_unit_that_fits(count_bytes, text):
    assert size(count_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (-3, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (3_599, "59 min 59 s"),
        (3_600, "1 h"),
        (3_605, "1 h"),
        (86_400, "1 day"),
        (3 * 86_400 + 7_200, "3 days 2 h"),
    ],
)
def test_spans_have_at_most_two_units_that_follow_each_other(seconds, text):
    assert span(seconds) == text


def test_one_is_not_many():
    assert (counted(1, "block"), counted(0, "block"), counted(1024, "block")) == ("1 block", "0 blocks", "1,024 blocks")


def test_a_share_of_nothing_is_unknown():
    assert share(0, 0) == "-"
    assert share(1, 8) == "12.5 %"


def test_what_is_not_nothing_is_seen():
    assert bar(0, 10, 40) == ""
    assert bar(1, 10**9, 40) == "█"
    assert bar(10, 10, 40) == "█" * 40


def test_paragraphs_fit_the_terminal():
    lines = paragraph("word " * 100, "      ").splitlines()
    assert all(line.startswith("      w") and len(line) < COLUMNS for line in lines)


def test_a_folder_of_the_person_is_written_as_such(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    assert shown_path(Path("/home/ann/.local/state/shoal")) == "~/.local/state/shoal"
    assert shown_path(Path("/srv/shoal")) == "/srv/shoal"
