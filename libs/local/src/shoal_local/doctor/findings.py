"""What one check found: a verdict, a sentence, and what to do next; and that every check ends.

A check that does not end within its deadline found nothing: its verdict is *unknown*, never *ok*. What blocks runs in
a thread of its own that nobody waits for at the end, because a file system that hangs cannot be interrupted.
"""

import asyncio
import contextlib
import enum
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

UNREADABLE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
)  # of what is not what it should be


class Verdict(enum.Enum):
    """``WRONG``: something does not work because of it. ``UNKNOWN``: it could not be looked at."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """``name`` stays the same over time, for programs; ``advice`` is what to do next, "" when nothing."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


Reading = TypeVar("Reading")
Findings: TypeAlias = Iterable[Finding]


def ok(name: str, found: str) -> Finding:
    return Finding(name, Verdict.OK, found)


def warning(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Verdict.WARNING, found, advice)


def wrong(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Verdict.WRONG, found, advice)


def unknown(name: str, found: str, advice: str = "") -> Finding:
    return Finding(name, Verdict.UNKNOWN, found, advice)


async def within(name: str, deadline_s: float, look: Awaitable[Findings]) -> list[Finding]:
    """What ``look`` finds; unknown, under ``name``, when it takes longer than ``deadline_s`` or the system refuses."""
    try:
        async with asyncio.timeout(deadline_s):
            return list(await look)
    except TimeoutError:
        return [unknown(name, f"it took longer than {deadline_s:g} s to look at it")]
    except OSError as error:
        return [unknown(name, f"it could not be looked at: {error.filename or 'the system'}: {error.strerror}")]
    except UNREADABLE as error:
        return [unknown(name, f"what was found there could not be read: {error}")]


async def aside(look: Callable[[], Reading]) -> Reading:
    """``look()``, which blocks, in a thread that may be left behind."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Reading] = loop.create_future()

    def tell(done: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if future.done() else done())

    def run() -> None:
        try:
            reading = look()
        except (OSError, *UNREADABLE) as error:
            refused = error
            tell(lambda: future.set_exception(refused))
        else:
            tell(lambda: future.set_result(reading))

    threading.Thread(target=run, name="doctor", daemon=True).start()
    return await future
