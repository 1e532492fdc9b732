"""One prefill job from taken to answered.

A job that was taken ends in exactly one way: answered and acknowledged, answered with a failure and terminated,
terminated in silence because its caller cancelled, or given back for another worker. While it runs it is claimed
again each second. A job whose gateway died is terminated too; its failure is told all the same, for a gateway that
was only frozen. The hand-off waits for the store only when at least one whole block was computed, and never past
``handoff_wait_s``: then the answer says that the store is unknown. A job that comes again while it runs here (a
claim was lost, or the gateway published it anew) joins the running one and is settled with it.
docs/decisions/0003-prefill-is-pulled.md, docs/decisions/0004-the-handoff-waits-briefly.md
"""

import asyncio
import enum
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from shoal_contracts.errors import BadRequest, Interrupted, ShoalError, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_engine.api import Engine, EngineFailed, EngineRequest, PrefillResult, RequestRefused
from shoal_kvblocks import HASH_BYTES, block_hashes
from shoal_prefill.prefetch import Prefetches
from shoal_runtime.clock import Clock
from shoal_runtime.logs import bind_context, get_logger

log = get_logger(__name__)

CLAIM_EACH_S = 1.0  # a third of the time after which the queue gives a silent worker's job to another one
MAX_REMEMBERED_CANCELS = 1024
MAX_LOST_CALLERS = 256


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """What a gateway asks. ``packed_token_ids`` is the prompt as it came, for its block hashes."""

    pool: str
    request: EngineRequest
    packed_token_ids: bytes
    budget_s: float
    caller: str  # instance id of the gateway
    expected_hit_tokens: int | None = None  # None: the index was not asked
    dram_store_ids: tuple[str, ...] = ()  # stores that have the whole expected hit in DRAM


class Stored(enum.Enum):
    """What is known of the last whole block when the job is answered."""

    YES = "yes"
    UNKNOWN = "unknown"  # the wait passed, or the index is away
    NONE = "none"  # no whole block was computed


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The KV of a prompt is computed and handed to the store."""

    hit_tokens: int
    miss_tokens: int
    stored: Stored
    first_token: int | None
    compute_ms: int
    store_wait_ms: int
    prefetched_blocks: int = 0  # of the hit, brought into the node's DRAM while the job waited in the engine
    prefetch_ms: int = 0


Answer = Prefilled | ShoalError


class Delivery(Protocol):
    """One job handed to this worker by its queue; see ``job_source``. None of the calls raises."""

    @property
    def job(self) -> PrefillJob: ...

    @property
    def number(self) -> int:
        """1: first delivery."""

    def span(self) -> AbstractContextManager[object]:
        """The trace of the gateway's request."""

    async def answer(self, answer: Answer) -> bool:
        """Tell the gateway; False when it could not be sent."""

    async def claim(self) -> None:
        """Still working on it."""

    async def ack(self) -> None: ...

    async def give_back(self) -> None: ...

    async def terminate(self) -> None: ...


class StoredBlocks(Protocol):
    """The directory's word on what is stored."""

    async def is_stored(self, job: PrefillJob, block_hash: bytes, wait_s: float) -> bool:
        """Whether the block is, or becomes within ``wait_s``, stored. Unavailable when nobody can tell."""


class Outcome(enum.Enum):
    """How a job left this worker."""

    DONE = "done"
    FAILED = "failed"  # answered with a failure
    CANCELLED = "cancelled"
    CALLER_LOST = "caller_lost"  # its gateway was not heard any more
    GIVEN_BACK = "given_back"  # this worker leaves, its engine died, or it crashed on the job
    ANSWER_LOST = "answer_lost"  # NATS is away: the gateway will publish the job again


@dataclass(frozen=True, slots=True)
class Settled:
    """The account of one job, for metrics."""

    outcome: Outcome
    answer: Answer | None = None


@dataclass(slots=True)
class _Running:
    deliveries: list[Delivery]
    attempt: asyncio.Task[Answer] | None = None
    unwanted: Outcome | None = None  # why nobody waits for the answer any more
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What bounds a job here."""

    max_deliveries: int
    handoff_wait_s: float


class PrefillJobs:
    """All jobs of one worker. ``work`` runs once per delivery, each in a task of its own on the one loop."""

    def __init__(
        self,
        engine: Engine,
        stored_blocks: StoredBlocks,
        limits: JobLimits,
        clock: Clock,
        on_settled: Callable[[Settled], None],
    ) -> None:
        self._engine = engine
        self._stored_blocks = stored_blocks
        self._limits = limits
        self._clock = clock
        self._on_settled = on_settled
        self._prefetches = Prefetches(engine)
        self._running: dict[str, _Running] = {}
        self._cancels: dict[str, None] = {}
        self._callers: dict[str, int] = {}
        self._lost_callers: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._running)

    @property
    def prompt_tokens(self) -> int:
        """Total length of the prompts that are being computed."""
        return sum(len(running.deliveries[0].job.request.token_ids) for running in self._running.values())

    def cancel(self, request_id: str) -> None:
        """The caller left: abort the request. Remembered for a moment, because a cancel may overtake its job."""
        running = self._running.get(request_id)
        if running is None:
            self._cancels[request_id] = None
            if len(self._cancels) > MAX_REMEMBERED_CANCELS:
                self._cancels.pop(next(iter(self._cancels)))
        else:
            _stop(running, Outcome.CANCELLED)

    def see_callers(self, incarnations: Mapping[str, int]) -> None:
        """The gateways that live now. What one asked that fell silent, or started anew, is aborted."""
        for caller, incarnation in self._callers.items():
            if incarnations.get(caller) == incarnation:
                continue
            self._lost_callers[caller] = None
            for running in self._running.values():
                if running.deliveries[0].job.caller == caller:
                    _stop(running, Outcome.CALLER_LOST)
        self._callers = dict(incarnations)
        for caller in incarnations:
            self._lost_callers.pop(caller, None)
        while len(self._lost_callers) > MAX_LOST_CALLERS:
            self._lost_callers.pop(next(iter(self._lost_callers)))

    async def work(self, delivery: Delivery) -> None:
        """Take one delivery to its end. Cancelled when this worker leaves: the job is given back."""
        request_id = delivery.job.request.request_id
        if (twin := self._running.get(request_id)) is not None:
            twin.deliveries.append(delivery)
            await twin.ended.wait()
            return
        running = self._running[request_id] = _Running([delivery])
        with delivery.span(), bind_context(request_id=request_id):
            settled = Settled(Outcome.GIVEN_BACK)
            try:
                settled = await self._settle(running)
            finally:
                await self._end(running, settled)

    async def _end(self, running: _Running, settled: Settled) -> None:
        delivery = running.deliveries[0]
        if settled.outcome is Outcome.GIVEN_BACK:
            for each in running.deliveries:
                await each.give_back()
        del self._running[delivery.job.request.request_id]
        running.ended.set()
        self._on_settled(settled)
        _log(settled, delivery.number)

    async def _settle(self, running: _Running) -> Settled:
        delivery = running.deliveries[0]
        answer: Answer | None = None
        running.unwanted = self._unwanted(delivery.job)
        if running.unwanted is None:
            answer = self._refusal(delivery) or await self._claimed(running)
        if running.unwanted is not None:
            if running.unwanted is Outcome.CALLER_LOST:
                await delivery.answer(Unavailable(pb.UNAVAILABLE, "a worker did not hear from this gateway; try again"))
            for each in running.deliveries:
                await each.terminate()
            return Settled(running.unwanted)
        if answer is None:
            return Settled(Outcome.GIVEN_BACK)
        if not await delivery.answer(answer):
            return Settled(Outcome.ANSWER_LOST, answer)
        # Only now: a job that is lost before its answer must come again.
        for each in running.deliveries:
            await (each.ack() if isinstance(answer, Prefilled) else each.terminate())
        return Settled(Outcome.DONE if isinstance(answer, Prefilled) else Outcome.FAILED, answer)

    def _unwanted(self, job: PrefillJob) -> Outcome | None:
        """Why nobody waits for a job that has just come."""
        if job.request.request_id in self._cancels:
            del self._cancels[job.request.request_id]
            return Outcome.CANCELLED
        return Outcome.CALLER_LOST if job.caller in self._lost_callers else None

    def _refusal(self, delivery: Delivery) -> ShoalError | None:
        """Why this job is not for this worker, before anything is computed."""
        job, engine = delivery.job, self._engine.description
        if delivery.number > self._limits.max_deliveries:
            message = f"the prompt could not be computed in {self._limits.max_deliveries} attempts"
            return Unavailable(pb.TOO_MANY_DELIVERIES, message)
        if job.pool != engine.pool:
            return Unavailable(pb.POOL_MISMATCH, "this worker serves another pool")
        if len(job.request.token_ids) >= engine.max_context_tokens:
            return _too_long(len(job.request.token_ids), engine.max_context_tokens)
        return None

    async def _claimed(self, running: _Running) -> Answer | None:
        """Run the attempt while claiming the job; None when it ended without an answer."""
        attempt = running.attempt = asyncio.create_task(self._attempt(running.deliveries[0].job), name="attempt")
        claims = asyncio.create_task(self._claim_each_second(running), name="claims")
        try:
            await asyncio.wait([attempt])
        finally:
            attempt.cancel()
            claims.cancel()
            await asyncio.wait([attempt, claims])
        return None if attempt.cancelled() else attempt.result()

    async def _claim_each_second(self, running: _Running) -> None:
        while True:
            await self._clock.sleep(CLAIM_EACH_S)
            for delivery in list(running.deliveries):
                await delivery.claim()

    async def _attempt(self, job: PrefillJob) -> Answer:
        began_s = self._clock.monotonic()
        try:
            async with asyncio.timeout(job.budget_s), self._prefetches.beside(job) as prefetch:
                result = await self._engine.prefill(job.request)
        except TimeoutError:
            return Interrupted(pb.DEADLINE_EXCEEDED, "computing the prompt took longer than the request may take")
        except RequestRefused:
            return BadRequest(pb.INVALID_REQUEST, "the model cannot run this request as it is")
        except EngineFailed as failed:
            return await self._after_failure(failed)
        computed_s = self._clock.monotonic()
        stored = await self._await_store(job, result, job.budget_s - (computed_s - began_s))
        return Prefilled(
            hit_tokens=result.hit_tokens,
            miss_tokens=result.miss_tokens,
            stored=stored,
            first_token=result.first_token,
            compute_ms=_ms(computed_s - began_s),
            store_wait_ms=_ms(self._clock.monotonic() - computed_s),
            prefetched_blocks=min(prefetch.told.blocks, result.hit_tokens // self._engine.description.block_tokens),
            prefetch_ms=prefetch.told.took_ms,
        )

    async def _after_failure(self, failed: EngineFailed) -> Answer:
        """This request failed: say so. The engine is dead: give the job back, another worker can do it."""
        try:
            await self._engine.check()
        except EngineFailed:
            raise asyncio.CancelledError("the engine is dead") from failed
        log.warning("engine.request_failed", reason=str(failed))
        return Unavailable(pb.ENGINE_FAILED, "the engine of a worker failed this request; try again")

    async def _await_store(self, job: PrefillJob, result: PrefillResult, budget_s: float) -> Stored:
        block_tokens = self._engine.description.block_tokens
        whole_blocks = len(job.request.token_ids) // block_tokens
        if whole_blocks <= result.hit_tokens // block_tokens:
            return Stored.NONE
        wait_s = min(self._limits.handoff_wait_s, budget_s)
        if wait_s <= 0:
            return Stored.UNKNOWN
        last_hash = block_hashes(job.packed_token_ids, block_tokens, job.request.items)[-HASH_BYTES:]
        try:
            is_stored = await self._stored_blocks.is_stored(job, last_hash, wait_s)
        except ShoalError:
            return Stored.UNKNOWN  # told and counted by the client of the index
        return Stored.YES if is_stored else Stored.UNKNOWN


def _stop(running: _Running, why: Outcome) -> None:
    running.unwanted = running.unwanted or why
    if running.attempt is not None:
        running.attempt.cancel()


def _too_long(prompt_tokens: int, max_context_tokens: int) -> BadRequest:
    message = f"the prompt has {prompt_tokens} tokens; this model's context is {max_context_tokens} with the answer"
    return BadRequest(pb.CONTEXT_LENGTH_EXCEEDED, message)


def _ms(duration_s: float) -> int:
    return max(0, round(duration_s * 1000))


def _log(settled: Settled, delivery: int) -> None:
    answer = settled.answer
    if isinstance(answer, Prefilled):
        log.info(
            "job.settled",
            outcome=settled.outcome.value,
            delivery=delivery,
            hit_tokens=answer.hit_tokens,
            miss_tokens=answer.miss_tokens,
            stored=answer.stored.value,
            compute_ms=answer.compute_ms,
            store_wait_ms=answer.store_wait_ms,
            prefetched_blocks=answer.prefetched_blocks,
            prefetch_ms=answer.prefetch_ms,
        )
    else:
        code = None if answer is None else pb.ErrorCode.Name(answer.code)
        log.info("job.settled", outcome=settled.outcome.value, delivery=delivery, error=code)
