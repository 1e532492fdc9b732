"""`shoal logs`: what the processes of an embedded home wrote, merged by time.

Exit codes: 0 shown, 1 there is no such log, 130 following was ended by Ctrl-C.
"""

import heapq
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from shoal_local.home import Home
from shoal_local.log_lines import LEVELS, LogLine, read_line
from shoal_local.terminal import output

POLL_S = 0.2
NAME_WIDTH = 9
STYLES = {"WARNING": "odd", "ERROR": "bad", "DEBUG": "quiet"}
OLDER = ".1"  # the file before the present one, as the supervisor turns them over


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Which lines are wanted."""

    least_level: str = "DEBUG"
    request_id: str = ""

    def wants(self, line: LogLine) -> bool:
        level = line.level if line.level in LEVELS else "INFO"
        is_grave = LEVELS.index(level) >= LEVELS.index(self.least_level)
        return is_grave and (not self.request_id or line.request_id == self.request_id)


def show_logs(home: Home, services: list[str], wanted: LogFilter, *, is_following: bool) -> int:
    """All that is kept of the named services, or of all; then what comes, if asked."""
    present = sorted(path.stem for path in home.logs.glob("*.log")) if home.logs.is_dir() else []
    missing = [service for service in services if service not in present]
    if missing or not present:
        print(_nothing_there(home, missing, present))
        return 1
    screen = output()
    with ExitStack() as stack:
        files = [stack.enter_context(LogFile(home.logs, service)) for service in services or present]
        for line in heapq.merge(*(file.read() for file in files), key=lambda line: line.at_s):
            _show(screen, line, wanted)
        while is_following:
            _show_all(screen, (line for file in files for line in file.read()), wanted)
            screen.file.flush()
            time.sleep(POLL_S)
    return 0


def _nothing_there(home: Home, missing: list[str], present: list[str]) -> str:
    if present:
        return f"No log of {', '.join(missing)} in {home.logs}; there are: {', '.join(present)}."
    return (
        f"No logs in {home.logs}: nothing ran from there yet. Set SHOAL_HOME if it ran from somewhere else; "
        "of a system in containers `docker compose logs` shows them."
    )


def _show_all(screen: Console, lines: Iterable[LogLine], wanted: LogFilter) -> None:
    for line in sorted(lines, key=lambda line: line.at_s):
        _show(screen, line, wanted)


def _show(screen: Console, line: LogLine, wanted: LogFilter) -> None:
    if wanted.wants(line):
        screen.print(shown(line), soft_wrap=True)


def shown(line: LogLine) -> Text:
    """``12:34:56.789 gateway   | request.settled outcome=finished``; the level in words where it is not INFO."""
    clock = datetime.fromtimestamp(line.at_s).strftime("%H:%M:%S.%f")[:-3] if line.at_s else " " * 12
    level = "" if line.level == "INFO" else f"{line.level} "
    return Text.assemble(
        (f"{clock} {line.service:<{NAME_WIDTH}} | ", "quiet"), (f"{level}{line.text}", STYLES.get(line.level, ""))
    )


class LogFile:
    """Reads one service's log on from where it was, across the moment when the supervisor turns the file over."""

    def __init__(self, folder: Path, service: str) -> None:
        self._path = folder / f"{service}.log"
        self._service = service
        self._at_s = 0.0
        self._rest = ""
        self._file: TextIO | None = None

    def __enter__(self) -> "LogFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def read(self) -> Iterator[LogLine]:
        """What is there now and was not read yet."""
        if self._file is None:
            yield from self._read_older()
            self._file = self._path.open(encoding="utf-8", errors="replace")
        yield from self._lines(self._file)
        if self._is_turned_over(self._file):
            yield from self._lines(self._file)  # what was written between its end and our look
            self._file.close()
            self._file = self._path.open(encoding="utf-8", errors="replace")
            yield from self._lines(self._file)

    def _read_older(self) -> Iterator[LogLine]:
        older = self._path.with_name(self._path.name + OLDER)
        if older.exists():
            with older.open(encoding="utf-8", errors="replace") as file:
                yield from self._lines(file)

    def _is_turned_over(self, file: TextIO) -> bool:
        try:
            return os.stat(self._path).st_ino != os.fstat(file.fileno()).st_ino
        except FileNotFoundError:  # between the two steps of turning over
            return False

    def _lines(self, file: TextIO) -> Iterator[LogLine]:
        """Whole lines only: what is being written is read with its end."""
        while part := file.readline():
            if not part.endswith("\n"):
                self._rest += part
                return
            line = read_line(self._service, (self._rest + part).rstrip("\r\n"), self._at_s)
            self._rest, self._at_s = "", line.at_s
            if line.text:
                yield line
