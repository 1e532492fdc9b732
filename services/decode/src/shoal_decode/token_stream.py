"""One placed request, from acceptance to its one end.

Whatever ends it early (the gateway's cancel, a lost connection, the budget, a reader that is too slow, this worker
leaving) takes the same way: the task that reads the engine is cancelled once, which closes the engine's iterator,
which aborts the engine's request once. The first reason wins and later ones are nothing. The sink hears of exactly
one end. docs/decisions/0016-deadlines-and-typed-failures.md
"""

import asyncio
import enum
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from shoal_engine.api import ConstraintRefused, Engine, EngineFailed, EngineRequest, FinishReason, RequestRefused, Step
from shoal_runtime.logs import get_logger

log = get_logger(__name__)


class Outcome(enum.Enum):
    """Why a stream ended; also the label of the metric."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"  # the gateway asked
    LOST = "lost"  # the connection broke; nobody hears of the end
    BUDGET_SPENT = "budget_spent"
    UNREAD = "unread"  # too many tokens waited for the gateway
    LEAVING = "leaving"  # this worker stops
    ENGINE_REFUSED = "engine_refused"
    ENGINE_FAILED = "engine_failed"
    CRASHED = "crashed"  # a bug of ours


_FINISHED = {
    FinishReason.STOP: Outcome.STOP,
    FinishReason.LENGTH: Outcome.LENGTH,
    FinishReason.CANCEL: Outcome.LEAVING,  # we did not ask: the engine stops
}


@dataclass(frozen=True, slots=True)
class Placement:
    """What a gateway places here."""

    request: EngineRequest
    pool: str
    is_local_prefill: bool
    budget_s: float

    @property
    def tokens(self) -> int:
        return len(self.request.token_ids) + len(self.request.resumed_token_ids)


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The last thing a sink hears."""

    outcome: Outcome
    completion_tokens: int  # resumed ones included, stop token excluded
    stop_token_id: int | None = None
    reason: str | None = None  # for the caller, where the outcome has a better one than its own


class StreamSink(Protocol):
    """Where a stream tells its steps; called on the loop, must not block."""

    def step(self, step: Step) -> bool:
        """False: too much waits unread, end this stream."""

    def finished(self, end: StreamEnd) -> None:
        """Called once, last."""


class TokenStream:
    """``run`` is one task; ``end`` may be called from anywhere on the loop, any number of times."""

    def __init__(self, engine: Engine, placement: Placement, sink: StreamSink) -> None:
        self.placement = placement
        self.hit_tokens: int | None = None  # None until the first step
        self.answer_tokens = 0  # generated here
        self._engine = engine
        self._sink = sink
        self._early: Outcome | None = None
        self._is_over = False
        self._stop_token_id: int | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def cached_tokens(self) -> int:
        return self.placement.tokens + self.answer_tokens

    def end(self, outcome: Outcome) -> None:
        """Stop early for ``outcome``."""
        if self._early is not None or self._is_over:
            return
        self._early = outcome
        # A task that was never run cannot be cancelled into an end of its own: then run() looks at _early first.
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Read the engine to the end. The request boundary of this stream: it always ends with a told outcome."""
        self._task = asyncio.current_task()
        outcome, reason = self._early or Outcome.LEAVING, None
        try:
            if self._early is None:
                outcome = await self._read()
        except asyncio.CancelledError:
            if self._early is None:  # the process closes
                raise
            outcome = self._early
        except RequestRefused as refusal:
            reason = str(refusal) if isinstance(refusal, ConstraintRefused) else None
            outcome = Outcome.ENGINE_REFUSED
        except EngineFailed as failed:
            # No traceback for each stream: the watch over the engine reports its death once.
            log.warning("stream.engine_failed", request_id=self.placement.request.request_id, reason=str(failed))
            outcome = Outcome.ENGINE_FAILED
        except Exception as error:
            log.error("stream.crashed", request_id=self.placement.request.request_id, exc_info=error)
            outcome = Outcome.CRASHED
        finally:
            self._is_over = True
            resumed_tokens = len(self.placement.request.resumed_token_ids)
            self._sink.finished(StreamEnd(outcome, resumed_tokens + self.answer_tokens, self._stop_token_id, reason))

    async def _read(self) -> Outcome:
        deadline = asyncio.timeout(self.placement.budget_s)
        try:
            async with deadline:
                return await self._read_steps()
        except TimeoutError:
            if not deadline.expired():
                raise
            return Outcome.BUDGET_SPENT

    async def _read_steps(self) -> Outcome:
        async with aclosing(self._engine.generate(self.placement.request)) as steps:
            async for step in steps:
                if (outcome := self._take(step)) is not None:
                    return outcome
        raise RuntimeError("the engine ended a stream without a finishing step")

    def _take(self, step: Step) -> Outcome | None:
        if step.hit_tokens is not None:
            self.hit_tokens = step.hit_tokens
        self.answer_tokens += len(step.token_ids)
        self._stop_token_id = step.stop_token_id
        if not self._sink.step(step):
            return Outcome.UNREAD
        return None if step.finish is None else _FINISHED[step.finish]
