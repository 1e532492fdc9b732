"""One line of a process's log: when it was written, how grave it is, and how a person reads it.

Our services write JSON. What others write (NATS, Postgres, the engine's libraries) is taken as it is; where it says
when and how grave it is in one of the usual ways, that is understood.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from shoal_local.console import read_entry, render

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_MOMENT = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?(?: (UTC|GMT))?")
_WORDS = {
    "ERROR": re.compile(r"\b(ERROR|FATAL|PANIC|CRITICAL)\b|\[(ERR|FTL)\]"),
    "WARNING": re.compile(r"\bWARN(ING)?\b|\[WRN\]"),
    "DEBUG": re.compile(r"\bDEBUG\b|\[(DBG|TRC)\]"),
}
HEAD_CHARACTERS = 120  # a level stands at the beginning; further on it is somebody's words


@dataclass(frozen=True, slots=True)
class LogLine:
    """``at_s`` is Unix time; a line that does not say when was written with the one before it."""

    service: str
    at_s: float
    level: str
    text: str
    request_id: str = ""


def read_line(service: str, line: str, before_s: float) -> LogLine:
    """One line; ``before_s`` is the time of the line before it in the same file."""
    entry = read_entry(line)
    if entry is None:
        return LogLine(service, _moment(line, before_s), _level(line), line)
    level = str(entry.get("level", "INFO"))
    at_s = _entry_moment(entry, before_s)
    return LogLine(service, at_s, "ERROR" if level == "CRITICAL" else level, render(entry), _request(entry))


def _entry_moment(entry: dict[str, Any], before_s: float) -> float:
    try:
        return datetime.fromisoformat(str(entry["at"])).timestamp()
    except (KeyError, ValueError):
        return before_s


def _request(entry: dict[str, Any]) -> str:
    return str(entry.get("request_id") or "")


def _moment(line: str, before_s: float) -> float:
    found = _MOMENT.search(line[:HEAD_CHARACTERS])
    if found is None:
        return before_s
    year, month, day, clock, fraction, zone = found.groups()
    try:
        moment = datetime.fromisoformat(f"{year}-{month}-{day}T{clock}.{(fraction or '0'):0<6}")
    except ValueError:
        return before_s
    return moment.replace(tzinfo=UTC).timestamp() if zone else moment.timestamp()


def _level(line: str) -> str:
    head = line[:HEAD_CHARACTERS]
    return next((level for level, words in _WORDS.items() if words.search(head)), "INFO")
