"""Reading a constraint before an engine has to hold it; xgrammar is imported only when one comes.

A schema can be written so that reading it takes minutes. The thread that does cannot be stopped, so only a few of them
may be under way; while they are, constraints are refused.
"""

import asyncio
import re
import threading

from shoal_engine.api import ConstraintRefused

READ_S = 10.0
_READERS = threading.BoundedSemaphore(4)
_ELSEWHERE = re.compile(r'"\$ref"\s*:\s*"(?!#)')  # xgrammar would take it for any value
_WHERE_IN_XGRAMMAR = re.compile(r"^\[[^\]]*\] \S+: ")


async def check_grammar(constraint: str) -> None:
    """ConstraintRefused when it is no structural tag, or takes longer than ``READ_S`` to read."""
    if not _READERS.acquire(blocking=False):
        raise ConstraintRefused("too many schemas are being read at once; send the request again, or a simpler schema")
    reading = asyncio.create_task(asyncio.to_thread(_read, constraint))
    reading.add_done_callback(_give_back)
    try:
        async with asyncio.timeout(READ_S):
            await asyncio.shield(reading)
    except TimeoutError:
        raise ConstraintRefused(f"reading the schema took longer than {READ_S:g} s; make it simpler") from None


def _give_back(reading: asyncio.Task[None]) -> None:
    _READERS.release()
    reading.exception()  # nobody may be waiting for it any more


def _read(constraint: str) -> None:
    import xgrammar

    if _ELSEWHERE.search(constraint):
        raise ConstraintRefused("a schema may refer to itself only: its '$ref' must begin with '#'")
    try:
        xgrammar.Grammar.from_structural_tag(constraint)
    except (RuntimeError, ValueError) as exc:
        reason = _WHERE_IN_XGRAMMAR.sub("", str(exc).strip()).partition("\n")[0][:300]
        raise ConstraintRefused(f"the schema or the tools cannot be enforced: {reason}") from exc
