"""How much is stored, and when a request waits for what another one computes."""

import asyncio
from dataclasses import dataclass, field

import pytest

from shoal_contracts.errors import Refused, ShoalError, Unavailable
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.history import AnswerHistory
from shoal_gateway.pace import MAX_POOLS, PrefillPaces
from shoal_gateway.ports import Fallback
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import BlockClaim, Blocks, Matched, PendingRun, Prompt, ServedModel
from shoal_gateway.steps.match import Affinity, MatchStep
from shoal_kvblocks import HASH_BYTES, count_hashes
from shoal_policy import UNKNOWN_PACE, AffinityPolicy
from shoal_testkit import VirtualClock, settle

MODEL = ServedModel("model", "pool", 4, 100)
PROMPT = Prompt("model", pack_u32(range(42)), b"", b"", is_streaming=False)  # ten blocks
AWAY = Unavailable(pb.UNAVAILABLE, "away")
FULL = Refused(pb.OVERLOADED, "full")
THEIRS = PendingRun(6, "other")


@dataclass
class Index:
    """Answers in turn, the last answer again and again. A wait lasts its whole time unless ``stored_after_s``."""

    clock: VirtualClock
    answers: list[Matched | ShoalError]
    stored_after_s: float | None = None
    await_error: ShoalError | None = None
    asked: list[tuple[float, float]] = field(default_factory=list)
    awaited: list[tuple[int, float]] = field(default_factory=list)
    settled: list[BlockClaim] = field(default_factory=list)
    hangs: bool = False

    async def match(self, claim: BlockClaim, *, hold_s: float, pending_s: float) -> Matched:
        self.asked.append((hold_s, pending_s))
        if self.hangs:
            await asyncio.Event().wait()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, ShoalError):
            raise answer
        return answer

    async def await_stored(self, claim: BlockClaim, block: int, wait_s: float) -> bool:
        self.awaited.append((block, wait_s))
        if self.await_error is not None:
            raise self.await_error
        if self.stored_after_s is not None and self.stored_after_s <= wait_s:
            await self.clock.sleep(self.stored_after_s)
            return True
        await self.clock.sleep(wait_s)
        return False

    def settle(self, claim: BlockClaim) -> None:
        self.settled.append(claim)


@dataclass
class Case:
    """One request; 1 token a second takes to compute, 4 a block."""

    answers: list[Matched | ShoalError]
    max_wait_s: float = 100.0
    clock: VirtualClock = field(default_factory=VirtualClock)
    receipt: Receipt = field(default_factory=lambda: Receipt("mine"))

    def __post_init__(self) -> None:
        self.index = Index(self.clock, self.answers)
        self.deadline_s = self.clock.monotonic() + 500.0
        policy = AffinityPolicy(self.max_wait_s, max_claim_s=60.0, assumed_tokens_per_s=1.0)
        self.step = MatchStep(self.index, AnswerHistory(0), Affinity(policy, PrefillPaces()), self.clock)

    def start(self, prompt: Prompt = PROMPT) -> "asyncio.Task[Blocks]":
        return asyncio.create_task(self.step.run(MODEL, prompt, "", self.receipt, self.deadline_s))

    async def run(self, advance_s: float = 200.0) -> tuple[Blocks, float]:
        """The blocks, and how long the request waited for them."""
        began_s, ended_s = self.clock.monotonic(), 0.0
        task = self.start()

        def on_end(_: object) -> None:
            nonlocal ended_s
            ended_s = self.clock.monotonic()

        task.add_done_callback(on_end)
        await self.clock.advance(advance_s)
        return task.result(), ended_s - began_s

    @property
    def shared(self) -> tuple[str, int | None, str | None] | None:
        part = self.receipt.shared
        return None if part is None else (part.request_id, part.waited_ms, part.outcome)


async def test_nobody_computes_it_so_this_request_claims_the_rest() -> None:
    case = Case([Matched(3)])
    blocks, waited_s = await case.run()
    assert (blocks.hit_blocks, blocks.is_claimed, waited_s) == (3, True, 0)
    assert case.receipt.matched_tokens == 12
    assert case.index.asked == [(500.0, 60.0)]
    assert (case.shared, case.receipt.fallbacks, case.index.settled) == (None, [], [])


async def test_whole_hit_claims_nothing() -> None:
    blocks, _ = await Case([Matched(10)]).run()
    assert (blocks.hit_blocks, blocks.is_claimed) == (10, False)


async def test_prompt_within_a_block_is_not_asked_about() -> None:
    case = Case([Matched(0)])
    task = case.start(Prompt("model", pack_u32(range(3)), b"", b"", is_streaming=False))
    await settle()
    assert task.result().hit_blocks == 0
    assert case.index.asked == []


@pytest.mark.parametrize("error", [AWAY, FULL], ids=["away", "full"])
async def test_index_without_an_answer_leaves_the_hit_unknown_and_may_have_the_claim(error: ShoalError) -> None:
    case = Case([error])
    blocks, _ = await case.run()
    assert (blocks.hit_blocks, blocks.is_claimed) == (None, True)
    assert case.receipt.fallbacks == [Fallback.INDEX_UNKNOWN]


async def test_what_another_request_computes_is_waited_for_and_found() -> None:
    case = Case([Matched(2, THEIRS), Matched(6)])
    case.index.stored_after_s = 0.4
    blocks, waited_s = await case.run()
    assert (blocks.hit_blocks, blocks.is_claimed) == (6, True)
    assert waited_s == pytest.approx(0.4)
    assert case.index.awaited == [(5, 0.5)]
    assert case.shared == ("other", 400, "stored")
    assert case.receipt.fallbacks == []


async def test_wait_ends_when_computing_would_have_been_done_at_the_latest() -> None:
    case = Case([Matched(2, THEIRS)])
    blocks, waited_s = await case.run()
    assert (blocks.hit_blocks, blocks.is_claimed) == (2, False)
    assert waited_s == pytest.approx(1.5 * 16.0)  # four blocks of four tokens
    assert case.shared == ("other", 24_000, "time_over")
    assert case.receipt.fallbacks == [Fallback.AFFINITY_MISSED]


async def test_setting_and_the_requests_own_deadline_bound_the_wait() -> None:
    case = Case([Matched(2, THEIRS)], max_wait_s=3.0)
    assert (await case.run())[1] == pytest.approx(3.0)
    case = Case([Matched(2, THEIRS)])
    case.deadline_s = case.clock.monotonic() + 1.0
    assert (await case.run())[1] == pytest.approx(1.0)


async def test_other_request_gives_up_and_this_one_claims() -> None:
    case = Case([Matched(2, THEIRS), Matched(2, THEIRS), Matched(2)])
    blocks, waited_s = await case.run()
    assert (blocks.hit_blocks, blocks.is_claimed) == (2, True)
    assert waited_s == pytest.approx(1.0)
    assert case.shared == ("other", 1000, "given_up")
    assert case.receipt.fallbacks == [Fallback.AFFINITY_MISSED]


async def test_chain_of_owners_is_not_waited_for_longer_than_computing_all_takes() -> None:
    answers: list[Matched | ShoalError] = [Matched(hit, PendingRun(hit + 1, f"owner-{hit}")) for hit in range(10)]
    case = Case([*answers, Matched(9, PendingRun(10, "last"))])
    blocks, waited_s = await case.run()
    assert blocks.hit_blocks == 9
    assert waited_s <= 1.5 * 40.0 + 1e-6


async def test_part_of_the_blocks_in_time_is_used_and_told_as_time_over() -> None:
    case = Case([Matched(2, THEIRS), Matched(4, THEIRS)])
    blocks, waited_s = await case.run()
    assert (blocks.hit_blocks, blocks.is_claimed) == (4, False)
    assert waited_s == pytest.approx(24.0)
    assert case.shared == ("other", 24_000, "time_over")
    assert case.receipt.fallbacks == [Fallback.AFFINITY_MISSED]


async def test_index_that_goes_away_ends_the_wait_with_what_is_known() -> None:
    case = Case([Matched(2, THEIRS)])
    case.index.await_error = AWAY
    blocks, waited_s = await case.run()
    assert (blocks.hit_blocks, waited_s) == (2, 0)
    assert case.shared == ("other", 0, "index_away")
    case = Case([Matched(2, THEIRS), AWAY])
    blocks, _ = await case.run()
    assert blocks.hit_blocks == 2
    assert case.receipt.fallbacks == [Fallback.AFFINITY_MISSED]


async def test_stored_block_that_is_no_hit_does_not_spin() -> None:
    case = Case([Matched(2, THEIRS)])
    case.index.stored_after_s = 0.0
    _, waited_s = await case.run()
    assert (waited_s, len(case.index.awaited)) == (0, 1)


async def test_request_that_leaves_while_it_asks_or_waits_gives_its_claim_up() -> None:
    case = Case([Matched(2, THEIRS)])
    case.index.hangs = True
    asking = case.start()
    await settle()
    case.index.hangs = False
    waiting = case.start()
    await settle()
    for task in (asking, waiting):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [(claim.request_id, claim.hashes) for claim in case.index.settled] == [("mine", b"")] * 2


def test_release_names_the_request_and_no_block_and_goes_where_the_claim_went() -> None:
    case = Case([Matched(0)])
    hashes = bytes(range(2 * HASH_BYTES))
    case.step.release(MODEL, PROMPT, Blocks(hashes, 4), "salt", "mine")
    [claim] = case.index.settled
    assert (claim.request_id, claim.cache_salt, count_hashes(claim.hashes)) == ("mine", "salt", 0)
    assert claim.first_block == hashes[:HASH_BYTES]


def test_paces_are_kept_by_pool_within_a_bound() -> None:
    paces = PrefillPaces()
    paces.record("idle", 0, 1.0, 0.0)
    assert paces.of("idle") == UNKNOWN_PACE
    for number in range(MAX_POOLS + 1):
        paces.record(f"pool{number}", 100, 1.0, 0.5)
    assert paces.of("pool0") == UNKNOWN_PACE
    assert paces.of("pool1").tokens == 100
