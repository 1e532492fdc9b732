"""`shoal doctor`: the page for a person, the object for a program, and the exit code.

Exit codes: 0 everything was looked at and nothing is wrong (there may be warnings), 1 otherwise.
"""

import asyncio
import json
from collections import Counter

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shoal_local.doctor.checkup import Checkup, Section, Target, check_up
from shoal_local.doctor.findings import Finding, Verdict
from shoal_local.terminal import as_text, output
from shoal_local.wording import counted

STYLES = {Verdict.OK: "good", Verdict.WARNING: "odd", Verdict.WRONG: "bad", Verdict.UNKNOWN: "odd"}


def show_doctor(target: Target, *, is_json: bool) -> int:
    """Look at everything, show it, and tell by the exit code whether all is well."""
    checkup = asyncio.run(check_up(target))
    if is_json:
        print(json.dumps(as_json(checkup), indent=1))
    else:
        screen, page = output(), render(checkup)
        screen.print(page if screen.is_terminal else as_text(page))
    return 0 if checkup.is_well else 1


def render(checkup: Checkup) -> RenderableType:
    """One line a finding, and below it what to do."""
    parts: list[RenderableType] = []
    for section in checkup.sections:
        parts += [Text(section.title, style="heading"), _rows(section), Text()]
    parts += [Text(f"not looked at: {told}", style="quiet") for told in checkup.not_looked_at]
    return Group(*parts, _sum(checkup))


def _rows(section: Section) -> RenderableType:
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for finding in section.findings:
        rows.add_row(Text(finding.verdict.value, style=STYLES[finding.verdict]), finding.name, _told(finding))
    return Padding(rows, (0, 0, 0, 2))


def _told(finding: Finding) -> Text:
    told = Text(finding.found)
    if finding.advice:
        told.append(f"\n→ {finding.advice}")
    return told


def _sum(checkup: Checkup) -> Text:
    counts = Counter(finding.verdict for finding in checkup.findings)
    if checkup.is_well:
        warned = f", {counted(counts[Verdict.WARNING], 'warning')}" if counts[Verdict.WARNING] else ""
        return Text(f"Nothing is wrong: {counted(len(checkup.findings), 'check')} made{warned}.", style="good")
    told = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in reversed(list(Verdict)) if counts[verdict])
    return Text(f"{counted(len(checkup.findings), 'check')}: {told}.", style="bad")


def as_json(checkup: Checkup) -> dict[str, object]:
    """Names stay the same over time; sentences may change."""
    return {
        "is_well": checkup.is_well,
        "sections": [
            {"title": section.title, "findings": [_finding(finding) for finding in section.findings]}
            for section in checkup.sections
        ],
        "not_looked_at": list(checkup.not_looked_at),
    }


def _finding(finding: Finding) -> dict[str, str]:
    return {
        "name": finding.name,
        "verdict": finding.verdict.value,
        "found": finding.found,
        "advice": finding.advice,
    }
