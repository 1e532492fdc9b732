"""Step 4: have the missing blocks computed and stored by a prefill worker, or leave it to decode.

Skipped when less than one whole block misses. A job whose answer is missing or that failed in a way that another
worker may not is queued again, within its attempts; the first answer to any attempt counts. Everything else that
stands in the way of prefill is a fallback: decode computes the prompt, the receipt says why. A request that ends
while its job is out cancels it, once.

The first token that prefill sampled is not used yet: in bfloat16 the logits of a prompt computed at once and of one
loaded from the store differ in the last bits, so the answer would depend on which worker made its first token.
docs/decisions/0004-the-handoff-waits-briefly.md
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal_contracts.errors import ERRORS, Interrupted, Refused, Unavailable
from shoal_gateway.pace import PrefillPaces
from shoal_gateway.ports import Fallback, PrefillQueue
from shoal_gateway.receipt import PrefillPart, Receipt
from shoal_gateway.request import Blocks, PrefillDone, PrefillWork, RequestPlan
from shoal_policy import Tier, choose_tier
from shoal_runtime.clock import Clock


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """How often and how long the gateway asks."""

    attempts: int
    answer_s: float
    tiers: Sequence[Tier]


class PrefillStep:
    """Shared by all requests."""

    def __init__(self, queue: PrefillQueue, limits: PrefillLimits, paces: PrefillPaces, clock: Clock) -> None:
        self._queue = queue
        self._limits = limits
        self._paces = paces
        self._clock = clock

    async def run(self, plan: RequestPlan, blocks: Blocks, receipt: Receipt) -> RequestPlan:
        """The plan with what prefill did; ``is_local_prefill`` when it did nothing that was needed."""
        plan = replace(plan, promised_blocks=blocks.hit_blocks or 0)
        if blocks.miss_blocks == 0:
            return plan
        tier = choose_tier(plan.prompt.prompt_tokens, self._limits.tiers)
        receipt.tier = tier
        fallback = self._queue.find_fallback(plan.model.pool, tier)
        if fallback is None:
            done = await self._compute(plan, blocks, tier, receipt)
            if done is not None:
                return replace(plan, hit_tokens=done.hit_tokens, promised_blocks=_promised_blocks(done, blocks))
        else:
            receipt.note(fallback)
        return replace(plan, is_local_prefill=True)

    async def _compute(self, plan: RequestPlan, blocks: Blocks, tier: str, receipt: Receipt) -> PrefillDone | None:
        """None: no attempt brought it."""
        part = receipt.prefill = PrefillPart()
        began_s = self._clock.monotonic()
        is_answered = False
        try:
            for attempt in range(1, self._limits.attempts + 1):
                part.attempts = attempt
                asked_s = self._clock.monotonic()
                done = await self._attempt(self._work(plan, blocks, tier, attempt), receipt)
                if isinstance(done, PrefillDone):
                    is_answered = True
                    waited_ms = round((self._clock.monotonic() - began_s) * 1000)
                    _record(done, waited_ms, receipt, part)
                    self._record_pace(plan.model.pool, done, self._clock.monotonic() - asked_s)
                    return done
                if not done:
                    break
            return None
        finally:
            # A job that was given up must not compute for nobody.
            if not is_answered:
                self._queue.cancel(plan.request_id, plan.model.pool)

    def _record_pace(self, pool: str, done: PrefillDone, took_s: float) -> None:
        # Of this attempt alone: the time-out of a worker that died is no pace, and would make others wait as long.
        compute_s = done.compute_ms / 1000
        self._paces.record(pool, done.miss_tokens, compute_s, max(0.0, took_s - compute_s))

    async def _attempt(self, work: PrefillWork, receipt: Receipt) -> PrefillDone | bool:
        """What was computed, else whether another attempt makes sense."""
        timeout_s = min(self._limits.answer_s, work.budget_s)
        try:
            return await self._queue.compute(work, timeout_s)
        except Refused:
            receipt.note(Fallback.PREFILL_QUEUE_FULL)
            return False
        except (Unavailable, Interrupted) as error:
            fallback = self._queue.find_fallback(work.pool, work.tier)
            if fallback is not None:
                receipt.note(fallback)
                return False
            is_last = work.attempt == self._limits.attempts or not _is_retried(error)
            receipt.note(Fallback.PREFILL_FAILED if is_last else Fallback.PREFILL_REPEATED)
            return not is_last

    def _work(self, plan: RequestPlan, blocks: Blocks, tier: str, attempt: int) -> PrefillWork:
        hit = None if blocks.hit_blocks is None else blocks.hit_blocks * blocks.block_tokens
        return PrefillWork(
            request_id=plan.request_id,
            attempt=attempt,
            pool=plan.model.pool,
            tier=tier,
            cache_salt=plan.cache_salt,
            prompt=plan.prompt,
            expected_hit_tokens=hit,
            traffic_class=plan.prompt.traffic_class,
            budget_s=max(0.001, plan.deadline_s - self._clock.monotonic()),
            dram_store_ids=blocks.dram_store_ids,
        )


def _is_retried(error: Unavailable | Interrupted) -> bool:
    return ERRORS[error.code].is_retried


def _promised_blocks(done: PrefillDone, blocks: Blocks) -> int:
    """What decode can count on finding; nothing when the store did not confirm, which is told already."""
    if done.stored == "yes":
        return blocks.whole_blocks
    return 0 if done.stored == "unknown" else blocks.hit_blocks or 0


def _record(done: PrefillDone, waited_ms: int, receipt: Receipt, part: PrefillPart) -> None:
    receipt.hit_tokens = done.hit_tokens
    part.instance_id = done.instance_id
    part.deliveries = done.delivery
    part.compute_ms = done.compute_ms
    part.store_wait_ms = done.store_wait_ms
    part.queue_ms = max(0, waited_ms - done.compute_ms - done.store_wait_ms)
    part.stored = done.stored
    if done.prefetched_blocks:
        part.prefetched_blocks, part.prefetch_ms = done.prefetched_blocks, done.prefetch_ms
    if done.stored == "unknown":
        receipt.note(Fallback.STORE_UNKNOWN)
