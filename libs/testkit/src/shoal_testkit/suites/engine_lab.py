"""How the engine suite gets its engines and reads them: hooks for the implementation, fixtures, tools.

Engines are slow to start, so most tests share one (class scope); they keep apart by request id and, where a hit
would matter, by a fresh cache salt. Deadlines only turn a hang into a failure.
"""

import asyncio
import enum
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

import pytest_asyncio

from shoal_engine.api import (
    Engine,
    EngineRequest,
    FinishReason,
    Sampling,
    Step,
    TokenLogprobs,
)

GREEDY = Sampling(temperature=0.0, ignore_eos=True)

_serial = itertools.count(1)


class Variant(enum.Enum):
    """Which engine ``make_engine`` is asked for. All of them reach the same store."""

    NORMAL = "normal"
    OTHER_POOL = "other_pool"  # KV that the normal one must not read: another dtype, for example
    CANNOT_START = "cannot_start"


@dataclass
class Answer:
    """Everything one ``generate`` told, put together."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    hit_tokens: int = -1
    finish: FinishReason | None = None
    stop_token_id: int | None = None

    def add(self, step: Step, *, is_first: bool) -> None:
        assert self.finish is None, "a step came after the finishing one"
        assert (step.hit_tokens is not None) == is_first, "hit_tokens belongs to the first step and only there"
        self.hit_tokens = self.hit_tokens if step.hit_tokens is None else step.hit_tokens
        self.token_ids += step.token_ids
        if step.logprobs is not None:
            assert len(step.logprobs) == len(step.token_ids)
            self.logprobs += step.logprobs
        self.finish, self.stop_token_id = step.finish, step.stop_token_id


async def read(engine: Engine, request: EngineRequest) -> Answer:
    """The whole answer, with the shape of each step checked."""
    answer = Answer()
    is_first = True
    async for step in engine.generate(request):
        answer.add(step, is_first=is_first)
        is_first = False
    assert answer.finish is not None, "the stream ended without a finishing step"
    return answer


def whole_blocks_before_last(prompt_tokens: int, block_tokens: int) -> int:
    """Tokens of the blocks that a repeated prompt must hit: at least one token is always computed."""
    return (prompt_tokens - 1) // block_tokens * block_tokens


class EngineLab:
    """The hooks that each implementation fills in, and what the tests build on."""

    token_range: tuple[int, int] = (5, 900)  # ids that the model knows and that mean nothing to it
    deadline_s: float = 30.0

    # Hooks

    @classmethod
    def make_engine(cls, variant: Variant) -> Engine:
        """A new engine, not started."""
        raise NotImplementedError

    async def forget_engine_copies(self, engine: Engine) -> None:
        """Wait until what was computed is stored, then drop the engine's own copies: the next hit must be loaded."""
        raise NotImplementedError

    async def forget_node_copies(self, engine: Engine, salt: str) -> None:
        """Wait until what the node's DRAM has under ``salt`` is on the shared level too, then drop it from DRAM."""
        raise NotImplementedError

    async def forget_shared_copies(self, engine: Engine) -> None:
        """Empty the shared level; the node's DRAM keeps what it has."""
        raise NotImplementedError

    def failing_loads(self, engine: Engine) -> AbstractAsyncContextManager[None]:
        """Inside it the store still promises its blocks to ``engine`` and every load of them fails."""
        raise NotImplementedError

    async def break_engine(self, engine: Engine) -> None:
        """Make a running engine die, as by the loss of its process or card. It need not be dead on return."""
        raise NotImplementedError

    # Fixtures

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls) -> AsyncIterator[Engine]:
        engine = cls.make_engine(Variant.NORMAL)
        await engine.start()
        yield engine
        await engine.stop()

    @pytest_asyncio.fixture(loop_scope="class")
    async def second(self) -> AsyncIterator[Engine]:
        """One that a test may ruin."""
        engine = self.make_engine(Variant.NORMAL)
        await engine.start()
        yield engine
        await engine.stop()

    @pytest_asyncio.fixture(loop_scope="class")
    async def stranger(self) -> AsyncIterator[Engine]:
        engine = self.make_engine(Variant.OTHER_POOL)
        await engine.start()
        yield engine
        await engine.stop()

    # Tools

    def prompt(self, tokens: int) -> list[int]:
        """Token ids that no other test uses."""
        draw = random.Random(next(_serial))
        return [draw.randrange(*self.token_range) for _ in range(tokens)]

    def a_request(
        self, prompt: Sequence[int], sampling: Sampling = GREEDY, *, max_tokens: int | None = 8, salt: str = ""
    ) -> EngineRequest:
        return EngineRequest(f"r{next(_serial)}", prompt, replace(sampling, max_tokens=max_tokens), cache_salt=salt)

    def a_long_request(self, engine: Engine) -> EngineRequest:
        """It cannot end by itself before a test has looked at it."""
        return self.a_request(self.prompt(20), max_tokens=None)

    def a_salt(self) -> str:
        return f"salt{next(_serial)}"

    async def read(self, engine: Engine, request: EngineRequest) -> Answer:
        async with asyncio.timeout(self.deadline_s):
            return await read(engine, request)

    async def until_running(self, engine: Engine, requests: int) -> None:
        async with asyncio.timeout(self.deadline_s):
            while (load := engine.load()).running_requests + load.waiting_requests != requests:
                await asyncio.sleep(0)
