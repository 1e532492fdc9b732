"""When a prompt is given to prefill workers, how often, and what stands in the receipt."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from shoal_contracts.errors import BadRequest, Refused, ShoalError, Unavailable
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.pace import PrefillPaces
from shoal_gateway.ports import Fallback
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import Blocks, PrefillDone, PrefillWork, Prompt, RequestPlan, ServedModel
from shoal_gateway.steps.prefill import PrefillLimits, PrefillStep
from shoal_kvblocks import block_hashes
from shoal_policy import SINGLE_TIER
from shoal_testkit import VirtualClock, settle

MODEL = ServedModel("model", "pool", 4, 100)
TOKENS = pack_u32(range(10))
PROMPT = Prompt("model", TOKENS, b"", b"", is_streaming=False)
PLAN = RequestPlan("r1", MODEL, PROMPT, "", deadline_s=1_100.0)
DONE = PrefillDone("worker", 1, hit_tokens=4, miss_tokens=6, stored="yes", compute_ms=5, store_wait_ms=1)
SILENT = Unavailable(pb.PEER_SILENT, "silent")


@dataclass
class FakeQueue:
    """Answers in turn; an error is raised."""

    answers: list[PrefillDone | ShoalError] = field(default_factory=lambda: [DONE])
    fallback: Fallback | None = None
    works: list[PrefillWork] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    hangs: bool = False

    def find_fallback(self, pool: str, tier: str) -> Fallback | None:
        return self.fallback

    async def compute(self, work: PrefillWork, timeout_s: float) -> PrefillDone:
        self.works.append(work)
        if self.hangs:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, ShoalError):
            raise answer
        return answer

    def cancel(self, request_id: str, pool: str) -> None:
        self.cancels.append(request_id)


def blocks(hit_blocks: int | None) -> Blocks:
    return Blocks(block_hashes(TOKENS, 4), 4, hit_blocks)


async def run(queue: FakeQueue, hit_blocks: int | None = 1, attempts: int = 2) -> tuple[RequestPlan, Receipt]:
    receipt = Receipt("r1", prompt_tokens=10)
    step = PrefillStep(queue, PrefillLimits(attempts, 5.0, SINGLE_TIER), PrefillPaces(), VirtualClock())
    return await step.run(PLAN, blocks(hit_blocks), receipt), receipt


async def test_missing_block_is_computed_and_its_hit_is_what_was_loaded() -> None:
    queue = FakeQueue()
    plan, receipt = await run(queue)
    assert (plan.hit_tokens, plan.is_local_prefill) == (4, False)
    assert plan.promised_blocks == 2
    assert receipt.hit_tokens == 4
    assert queue.works[0].expected_hit_tokens == 4
    assert queue.cancels == []


async def test_what_was_prefetched_stands_in_the_receipt_and_nothing_when_nothing_was() -> None:
    _, receipt = await run(FakeQueue([replace(DONE, prefetched_blocks=3, prefetch_ms=40)]))
    assert receipt.fields()["prefill"].items() >= {"prefetched_blocks": 3, "prefetch_ms": 40}.items()
    _, receipt = await run(FakeQueue())
    assert not {"prefetched_blocks", "prefetch_ms"} & receipt.fields()["prefill"].keys()


async def test_job_names_the_stores_that_have_the_hit_in_dram() -> None:
    queue = FakeQueue()
    step = PrefillStep(queue, PrefillLimits(1, 5.0, SINGLE_TIER), PrefillPaces(), VirtualClock())
    await step.run(PLAN, replace(blocks(1), dram_store_ids=("node-a",)), Receipt("r1"))
    assert queue.works[0].dram_store_ids == ("node-a",)


async def test_unknown_hit_counts_as_a_miss() -> None:
    queue = FakeQueue()
    await run(queue, hit_blocks=None)
    assert queue.works[0].expected_hit_tokens is None


async def test_less_than_a_block_is_left_to_decode_without_a_fallback() -> None:
    queue = FakeQueue()
    plan, receipt = await run(queue, hit_blocks=2)
    assert queue.works == []
    assert not plan.is_local_prefill
    assert receipt.prefill is None and receipt.fallbacks == []
    assert plan.promised_blocks == 2


@pytest.mark.parametrize("fallback", [Fallback.NATS_AWAY, Fallback.NO_PREFILL_WORKER])
async def test_what_cannot_be_queued_is_computed_by_decode(fallback: Fallback) -> None:
    queue = FakeQueue(fallback=fallback)
    plan, receipt = await run(queue)
    assert plan.is_local_prefill
    assert plan.promised_blocks == 1  # as Match said
    assert receipt.fallbacks == [fallback]
    assert queue.works == queue.cancels == []


async def test_missing_answer_is_asked_for_again() -> None:
    queue = FakeQueue([SILENT, DONE])
    plan, receipt = await run(queue)
    assert plan.hit_tokens == 4
    assert [work.attempt for work in queue.works] == [1, 2]
    assert receipt.fallbacks == [Fallback.PREFILL_REPEATED]
    assert queue.cancels == []


async def test_attempt_that_was_lost_does_not_slow_the_pace() -> None:
    clock, paces = VirtualClock(), PrefillPaces()

    class SlowToFail(FakeQueue):
        async def compute(self, work: PrefillWork, timeout_s: float) -> PrefillDone:
            await clock.sleep(timeout_s if work.attempt == 1 else 0.105)
            return await super().compute(work, timeout_s)

    step = PrefillStep(SlowToFail([SILENT, DONE]), PrefillLimits(2, 120.0, SINGLE_TIER), paces, clock)
    task = asyncio.create_task(step.run(replace(PLAN, deadline_s=clock.monotonic() + 500), blocks(1), Receipt("r1")))
    await clock.advance(200)
    await task
    pace = paces.of("pool")
    assert (pace.tokens, pace.compute_s, pace.overhead_s) == (6, 0.005, pytest.approx(0.1))


async def test_attempts_are_bounded_and_what_is_out_is_cancelled_once() -> None:
    queue = FakeQueue([SILENT, SILENT])
    plan, receipt = await run(queue)
    assert plan.is_local_prefill
    assert receipt.fallbacks == [Fallback.PREFILL_REPEATED, Fallback.PREFILL_FAILED]
    assert queue.cancels == ["r1"]


async def test_failure_that_another_worker_would_repeat_is_not_tried_again() -> None:
    queue = FakeQueue([Unavailable(pb.TOO_MANY_DELIVERIES, "killed workers")])
    plan, receipt = await run(queue)
    assert plan.is_local_prefill
    assert receipt.fallbacks == [Fallback.PREFILL_FAILED]


async def test_full_queue_is_not_waited_for() -> None:
    plan, receipt = await run(FakeQueue([Refused(pb.OVERLOADED, "full")]))
    assert plan.is_local_prefill
    assert receipt.fallbacks == [Fallback.PREFILL_QUEUE_FULL]


async def test_what_the_caller_must_change_is_told() -> None:
    with pytest.raises(BadRequest):
        await run(FakeQueue([BadRequest(pb.CONTEXT_LENGTH_EXCEEDED, "too long")]))


async def test_store_that_did_not_confirm_stands_in_the_receipt() -> None:
    unsure = PrefillDone("worker", 1, 4, 6, "unknown", 5, 1)
    plan, receipt = await run(FakeQueue([unsure]))
    assert not plan.is_local_prefill
    assert receipt.fallbacks == [Fallback.STORE_UNKNOWN]
    assert plan.promised_blocks == 0


async def test_request_that_ends_while_its_job_is_out_cancels_it_once() -> None:
    queue = FakeQueue(hangs=True)
    task = asyncio.create_task(run(queue))
    await settle()
    task.cancel()
    await settle()
    assert task.cancelled()
    assert queue.cancels == ["r1"]
