"""How our commands write: tables without lines, colours where somebody looks, and an end that is no error.

What was asked for goes to standard output; what is said beside it goes to standard error, so that a pipe gets only
the former.
"""

import io
import os
import sys

from rich.console import Console, RenderableType
from rich.table import Table
from rich.theme import Theme

PLAIN_COLUMNS = 160  # where nobody looks, nothing is wrapped to a screen
THEME = Theme({"heading": "bold", "column": "dim", "good": "green", "odd": "yellow", "bad": "bold red", "quiet": "dim"})


def output() -> Console:
    """Standard output."""
    return _console(is_error=False)


def remarks() -> Console:
    """Standard error."""
    return _console(is_error=True)


def _console(*, is_error: bool) -> Console:
    console = Console(stderr=is_error, highlight=False, markup=False, emoji=False, soft_wrap=False, theme=THEME)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PLAIN_COLUMNS
    return console


def table(title: str, *columns: str, right: frozenset[str] = frozenset()) -> Table:
    """Ours all look alike. Columns in ``right`` hold numbers."""
    made = Table(
        title=title or None,
        title_justify="left",
        title_style="heading",
        header_style="column",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left")
    return made


def as_text(content: RenderableType) -> str:
    """Without colours, as wide as it is."""
    console = Console(file=io.StringIO(), width=PLAIN_COLUMNS, theme=THEME, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(content)
    return "\n".join(line.rstrip() for line in capture.get().rstrip("\n").split("\n"))


def leave_quietly() -> None:
    """The reader of our output is gone, as `head` is: what Python writes at its end must not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
