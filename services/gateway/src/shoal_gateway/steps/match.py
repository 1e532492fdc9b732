"""Step 3: how much of the prompt is already stored, or will be in a moment because another request computes it.

The index is a hint. Without an answer the hit is unknown: the request goes on, prefill finds what is there, and the
receipt says so. A request that shares blocks which another one has computed waits for them, never longer than
computing them would take, asks again, and goes on with the longer hit. What ends a wait is never a failure: when the
other one died, or the time is over, or the index is away, the request goes on and computes; the receipt says so.
What a request has computed itself it claims with its question, and gives up in ``release`` when it will not come.
docs/decisions/0012-one-computation-for-one-prefix.md
"""

import asyncio
import enum
from dataclasses import dataclass, replace

from shoal_contracts.errors import Refused, Unavailable
from shoal_gateway.history import AnswerHistory
from shoal_gateway.pace import PrefillPaces
from shoal_gateway.ports import Fallback, KvIndex
from shoal_gateway.receipt import Receipt, SharedPart
from shoal_gateway.request import BlockClaim, Blocks, Matched, PendingRun, Prompt, ServedModel
from shoal_kvblocks import HASH_BYTES, block_hashes
from shoal_policy import AffinityPolicy
from shoal_runtime.clock import Clock

ASK_AGAIN_S = 0.5  # how soon a waiting request sees that the other one gave up


class WaitOutcome(enum.Enum):
    """How a wait for another request's blocks ended. A metric label."""

    STORED = "stored"
    TIME_OVER = "time_over"
    GIVEN_UP = "given_up"  # nobody computes them any more
    INDEX_AWAY = "index_away"


@dataclass(frozen=True, slots=True)
class Affinity:
    """By what waiting is bounded."""

    policy: AffinityPolicy
    paces: PrefillPaces


class MatchStep:
    """Shared by all requests."""

    def __init__(self, index: KvIndex, history: AnswerHistory, affinity: Affinity, clock: Clock) -> None:
        self._index = index
        self._history = history
        self._affinity = affinity
        self._clock = clock

    async def run(
        self, model: ServedModel, prompt: Prompt, cache_salt: str, receipt: Receipt, deadline_s: float
    ) -> Blocks:
        """Never fails: an index that does not answer leaves ``hit_blocks`` unknown."""
        blocks = Blocks(block_hashes(prompt.token_ids, model.block_tokens, prompt.items), model.block_tokens)
        receipt.diverged_at_token = self._history.diverged_at_token(model.pool, blocks, prompt.token_ids)
        if not blocks.whole_blocks:
            receipt.matched_tokens = 0
            return replace(blocks, hit_blocks=0)
        claim = BlockClaim(receipt.request_id, model.pool, cache_salt, blocks.hashes, prompt.traffic_class)
        try:
            matched = await self._ask(claim, blocks, deadline_s)
            if matched.pending is not None:
                matched = await self._wait(claim, blocks, matched, receipt, deadline_s)
        except (Unavailable, Refused):
            receipt.note(Fallback.INDEX_UNKNOWN)
            return replace(blocks, is_claimed=True)  # an instance that answered too late has the claim
        except asyncio.CancelledError:
            self._index.settle(_given_up(claim))  # the question may have been heard
            raise
        receipt.matched_tokens = matched.hit_blocks * model.block_tokens
        is_claimed = matched.pending is None and matched.hit_blocks < blocks.whole_blocks
        return replace(
            blocks, hit_blocks=matched.hit_blocks, dram_store_ids=matched.dram_store_ids, is_claimed=is_claimed
        )

    def release(self, model: ServedModel, prompt: Prompt, blocks: Blocks, cache_salt: str, request_id: str) -> None:
        """What this request claimed will not be stored, as far as it knows: nobody should wait for it."""
        claim = BlockClaim(request_id, model.pool, cache_salt, blocks.hashes, prompt.traffic_class)
        self._index.settle(_given_up(claim))

    async def _ask(self, claim: BlockClaim, blocks: Blocks, deadline_s: float) -> Matched:
        policy, pace = self._affinity.policy, self._affinity.paces.of(claim.pool)
        pending_s = policy.claim_s(blocks.whole_blocks * blocks.block_tokens, pace)
        return await self._index.match(
            claim, hold_s=max(0.0, deadline_s - self._clock.monotonic()), pending_s=pending_s
        )

    async def _wait(
        self, claim: BlockClaim, blocks: Blocks, first: Matched, receipt: Receipt, deadline_s: float
    ) -> Matched:
        """The last that the index said."""
        assert first.pending is not None
        began_s = self._clock.monotonic()
        part = receipt.shared = SharedPart(first.pending.request_id)
        matched, is_away = first, False
        try:
            while (run := matched.pending) is not None:
                until_s = min(deadline_s, began_s + self._bound_s(claim.pool, run, first, blocks.block_tokens))
                wait_s = until_s - self._clock.monotonic()
                if wait_s <= 0:
                    break
                is_stored = await self._index.await_stored(claim, run.blocks - 1, min(wait_s, ASK_AGAIN_S))
                before, matched = matched, await self._ask(claim, blocks, deadline_s)
                if is_stored and matched.hit_blocks <= before.hit_blocks:
                    break  # it is stored and yet no hit: waiting for it brings nothing
        except (Unavailable, Refused):
            is_away = True
        finally:
            part.waited_ms = round((self._clock.monotonic() - began_s) * 1000)
        outcome = _outcome(first, matched, is_away=is_away)
        part.outcome = outcome.value
        if outcome is not WaitOutcome.STORED:
            receipt.note(Fallback.AFFINITY_MISSED)
        return matched

    def _bound_s(self, pool: str, run: PendingRun, first: Matched, block_tokens: int) -> float:
        """Of the whole wait: blocks that came meanwhile count, so a chain of owners is not waited for one by one."""
        shared_tokens = (run.blocks - first.hit_blocks) * block_tokens
        return self._affinity.policy.wait_s(shared_tokens, self._affinity.paces.of(pool))


def _given_up(claim: BlockClaim) -> BlockClaim:
    """None of it, for the instance that was asked about it first: others may not have heard of the claim."""
    return replace(claim, hashes=b"", first_block=claim.hashes[:HASH_BYTES])


def _outcome(first: Matched, last: Matched, *, is_away: bool) -> WaitOutcome:
    if first.pending is not None and last.hit_blocks >= first.pending.blocks:
        return WaitOutcome.STORED
    if is_away:
        return WaitOutcome.INDEX_AWAY
    return WaitOutcome.GIVEN_UP if last.pending is None else WaitOutcome.TIME_OVER
