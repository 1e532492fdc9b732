"""What was not looked at is never called fine, every check ends, and the exit code says whether all is well."""

import asyncio
import threading

import pytest

from shoal_local.doctor.checkup import Checkup, Section
from shoal_local.doctor.findings import Verdict, aside, ok, unknown, warning, within, wrong
from shoal_local.doctor.report import as_json, render
from shoal_local.terminal import as_text


def a_checkup(*findings):
    return Checkup((Section("this machine", findings),), ("a running system: give --nats URL",))


@pytest.mark.parametrize(
    ("findings", "is_well", "words"),
    [
        ([ok("a", "fine")], True, "Nothing is wrong: 1 check made."),
        ([ok("a", "fine"), warning("b", "odd", "look")], True, "Nothing is wrong: 2 checks made, 1 warning."),
        ([ok("a", "fine"), unknown("b", "not seen")], False, "2 checks: 1 unknown, 1 ok."),
        ([wrong("a", "broken", "mend it"), warning("b", "odd", "look")], False, "2 checks: 1 wrong, 1 warning."),
    ],
)
def test_only_what_was_looked_at_and_is_not_wrong_is_well(findings, is_well, words):
    checkup = a_checkup(*findings)
    assert checkup.is_well is is_well
    page = as_text(render(checkup))
    assert page.endswith(words)
    assert "not looked at: a running system" in page


def test_a_finding_stands_on_the_page_with_what_to_do():
    page = as_text(render(a_checkup(wrong("disk", "only 1 MiB free", "Free room."))))
    assert "wrong  disk  only 1 MiB free" in page
    assert "→ Free room." in page


def test_programs_get_every_finding():
    told = as_json(a_checkup(wrong("disk", "full", "Free room."), ok("nats", "answers")))
    assert told["is_well"] is False
    assert told["sections"][0]["findings"] == [
        {"name": "disk", "verdict": "wrong", "found": "full", "advice": "Free room."},
        {"name": "nats", "verdict": "ok", "found": "answers", "advice": ""},
    ]


async def test_a_check_that_hangs_is_unknown_and_keeps_nobody():
    release = threading.Event()

    def hang():
        release.wait()
        return [ok("disk", "fine")]

    (finding,) = await within("disk", 0.05, aside(hang))
    release.set()
    assert (finding.name, finding.verdict) == ("disk", Verdict.UNKNOWN)
    await asyncio.sleep(0)


async def test_what_the_system_refuses_is_unknown():
    def refuse():
        raise PermissionError(13, "Permission denied", "/proc/1/fd")

    (finding,) = await within("disk", 5, aside(refuse))
    assert finding.verdict is Verdict.UNKNOWN
    assert "/proc/1/fd: Permission denied" in finding.found


async def test_what_was_read_aside_comes_back():
    assert await within("disk", 5, aside(lambda: [ok("disk", "fine")])) == [ok("disk", "fine")]


async def test_what_cannot_be_read_is_unknown_and_not_slow():
    def misread():
        return [ok("memory", str(int("2GiB")))]

    (finding,) = await within("memory", 5, aside(misread))
    assert (finding.verdict, "2GiB" in finding.found) == (Verdict.UNKNOWN, True)
