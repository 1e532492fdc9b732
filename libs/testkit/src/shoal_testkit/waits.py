"""Waiting in tests for what other tasks or processes bring about; tests on virtual time use ``settle`` instead."""

import asyncio
from collections.abc import Callable

POLL_S = 0.01


async def until(claim: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Return as soon as ``claim`` holds; TimeoutError when it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not claim():
            await asyncio.sleep(POLL_S)
