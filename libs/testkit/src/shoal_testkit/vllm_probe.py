"""What tests must reach inside a vLLM engine for: its processes, and its own copies of KV. Nothing else may."""

import asyncio
import itertools

from shoal_engine.api import EngineRequest, Sampling
from shoal_engine.vllm.engine import VllmEngine

_serial = itertools.count(1)


def engine_process_ids(engine: VllmEngine) -> list[int]:
    """The processes that compute for ``engine``."""
    assert engine._launched is not None
    return [process.pid for process in engine._launched.processes if process.pid is not None]


async def forget_engine_copies(engine: VllmEngine, *, timeout_s: float = 60.0) -> None:
    """Wait until everything is stored and drop what the engine keeps: the next hit must come from the store.

    vLLM gives blocks back in the step after their store has ended, and drops its copies only when all are back; a
    one-token request makes it step.
    """
    assert engine._launched is not None
    async with asyncio.timeout(timeout_s):
        while not await engine._launched.llm.reset_prefix_cache():
            request = EngineRequest(f"probe-{next(_serial)}", (1,), Sampling(max_tokens=1, temperature=0.0))
            await engine.prefill(request)
