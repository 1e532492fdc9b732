"""Numbers, spans and moments as people read them on a terminal of 80 columns."""

import textwrap
import time
from pathlib import Path

COLUMNS = 80
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
SPANS = ((86_400, "day"), (3_600, "h"), (60, "min"), (1, "s"))


def size(count_bytes: int) -> str:
    """``41.3 GiB``."""
    value = float(count_bytes)
    for unit in UNITS:
        if value < 1024 or unit == UNITS[-1]:
            break
        value /= 1024
    return f"{count_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def counted(count: int, noun: str) -> str:
    """``1,024 blocks``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def span(seconds: float) -> str:
    """The largest unit that fits, and the next one when it says something: ``1 day 4 h``, ``12 min``."""
    left_s = max(0, round(seconds))
    parts: list[str] = []
    for unit_s, name in SPANS:
        count, left_s = divmod(left_s, unit_s)
        if count:
            parts.append(f"{count} {name}s" if name == "day" and count > 1 else f"{count} {name}")
        if len(parts) == 2 or (parts and not count):
            break
    return " ".join(parts) or "0 s"


def moment(unix_s: float) -> str:
    """In the time of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def share(part: int, whole: int) -> str:
    """``87.3 %``; unknown without a whole."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def shown_path(path: Path) -> str:
    """As people write it: a folder of their own begins with ``~``."""
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):  # elsewhere, or nobody's home is known
        return str(path)


def bar(part: int, largest: int, width: int) -> str:
    """A line as long as its share of ``largest``; what is not nothing is seen."""
    if not part:
        return ""
    return "█" * max(1, round(width * part / largest))


def paragraph(text: str, indent: str = "") -> str:
    """Wrapped to the terminal that we write for."""
    return textwrap.fill(
        text,
        COLUMNS - 2,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
