"""What the person at the terminal reads, and what goes to the log files.

Every line of a process goes to its file as it came; files are bounded (two of ``FILE_BYTES`` a process). The JSON
lines of our services are also shown, one short line each: ``gateway | request.settled outcome=finished``. Lines of
third parties and of libraries are shown only from WARNING on, or all with ``is_verbose``. A terminal that went
away does not stop the system: showing ends, the files go on.
"""

import json
import logging
import logging.handlers
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

FILE_BYTES = 8 * 1024 * 1024
TAIL_LINES = 15
NAME_WIDTH = 9
LINE_CHARACTERS = 2000
HIDDEN_KEYS = frozenset({"at", "level", "event", "service", "instance_id", "logger", "traceback"})
COLOURS = {"WARNING": "\033[33m", "ERROR": "\033[31m", "CRITICAL": "\033[31m"}
DIM, PLAIN = "\033[2m", "\033[0m"
OWN_NAME = "shoal"


class Console:
    """Owned by the supervisor and written to from its loop only."""

    def __init__(
        self, logs: Path, *, is_verbose: bool, out: TextIO | None = None, file_bytes: int = FILE_BYTES
    ) -> None:
        self._logs = logs
        self._file_bytes = file_bytes
        self._is_verbose = is_verbose
        self._out: TextIO | None = sys.stdout if out is None else out
        self._is_coloured = self._out.isatty()
        self._files: dict[str, logging.handlers.RotatingFileHandler] = {}
        self._tails: dict[str, deque[tuple[float, str]]] = {}  # with the moment when each line came
        self._started = time.monotonic()

    def elapsed_s(self) -> float:
        """Since this console was made, which is when ``shoal up`` began."""
        return time.monotonic() - self._started

    def say(self, text: str, level: str = "INFO") -> None:
        """A line of the supervisor itself, with the seconds since the start."""
        self._show(OWN_NAME, f"{self.elapsed_s():5.1f} s  {text}", level)

    def say_plain(self, text: str) -> None:
        """Text to be copied from the terminal."""
        self._write(text + "\n")

    def take(self, service: str, line: str) -> None:
        """A line that a process wrote."""
        self._keep(service, line)
        entry = read_entry(line)
        level = "INFO" if entry is None else str(entry.get("level", "INFO"))
        is_ours = entry is not None and (entry["event"] != "log" or level != "INFO")
        text = line if entry is None else render(entry)
        if not is_ours:
            self._tails[service].append((time.monotonic(), text))
        if is_ours or self._is_verbose:
            self._show(service, text, level)

    def tail(self, service: str, *, since_s: float) -> list[str]:
        """The last lines of a process that came since then (monotonic) and were not shown: they may explain its end."""
        return [_shorten(line) for at_s, line in self._tails.get(service, ()) if at_s >= since_s]

    def close(self) -> None:
        for handler in self._files.values():
            handler.close()

    def _keep(self, service: str, line: str) -> None:
        if service not in self._files:
            path = self._logs / f"{service}.log"
            self._files[service] = logging.handlers.RotatingFileHandler(path, maxBytes=self._file_bytes, backupCount=1)
            self._tails[service] = deque(maxlen=TAIL_LINES)
        self._files[service].emit(logging.makeLogRecord({"msg": line}))

    def _show(self, service: str, text: str, level: str) -> None:
        colour = COLOURS.get(level, "")
        mark = "" if level in ("INFO", "DEBUG") or self._is_coloured else f"{level} "
        name = f"{service:<{NAME_WIDTH}} | "
        if self._is_coloured:
            self._write(f"{DIM}{name}{PLAIN}{colour}{_shorten(text)}{PLAIN}\n")
        else:
            self._write(f"{name}{mark}{_shorten(text)}\n")

    def _write(self, text: str) -> None:
        if self._out is None:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except OSError:
            self._out = None


def render(entry: dict[str, Any]) -> str:
    """One JSON log line as people read it: the event, then its keys; a traceback's last line at the end."""
    shown = {key: value for key, value in entry.items() if key not in HIDDEN_KEYS}
    parts = [str(entry["event"]), *_pairs("", shown)]
    if traceback := entry.get("traceback"):
        parts.append(str(traceback).strip().rsplit("\n", 1)[-1])
    return " ".join(parts)


def _pairs(prefix: str, fields: dict[str, Any]) -> Iterator[str]:
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from _pairs(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}={_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ",".join(map(_value, value))
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if " " in text else text


def read_entry(line: str) -> dict[str, Any] | None:
    """A line of one of our services; None when somebody else wrote it."""
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "event" in entry else None


def _shorten(text: str) -> str:
    return text if len(text) <= LINE_CHARACTERS else text[:LINE_CHARACTERS] + " …"
