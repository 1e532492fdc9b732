"""One answer between its decode worker, its tokenizer and its client, with every end that either may come to."""

import asyncio
from dataclasses import replace

import pytest

from shoal_contracts.errors import Interrupted, Unavailable
from shoal_contracts.ids import pack_u32, unpack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.ports import EndReason, Fallback
from shoal_testkit import settle

from .stream_case import LOST, PLAN, PROMPT, Case, started


async def test_tokens_pass_and_the_end_is_the_tokenizers() -> None:
    case = await started()
    case.placed.sink.on_started(4)
    case.placed.generate(1, 2)
    case.placed.generate(3)
    case.placed.sink.on_finished(EndReason.STOP, None)
    await settle()
    assert case.events.tokens == [1, 2, 3]
    [ending] = case.events.endings
    assert (ending.reason, ending.hit_tokens) == (EndReason.STOP, 4)
    assert not case.running.done()
    case.events.close()
    await case.running
    assert case.receipt.completion_tokens == 3
    assert case.placed.cancels == case.events.drops == 0


async def test_stop_string_cancels_decode_once_whatever_crosses_it() -> None:
    case = await started()
    case.placed.generate(1, 2)
    case.events.sink.on_stopped()
    case.placed.generate(3)
    await settle()
    case.placed.sink.on_finished(EndReason.LENGTH, None)
    await settle()
    assert [ending.reason for ending in case.events.endings] == [EndReason.STOP]
    case.events.close()
    await case.running
    assert case.placed.cancels == 1


@pytest.mark.parametrize("end", ["lost", "failed", "cancelled"])
async def test_lost_worker_is_replaced_with_the_tokens_so_far(end: str) -> None:
    case = await started()
    first = case.placed
    first.generate(1, 2)
    if end == "lost":
        first.sink.on_lost(LOST)
    elif end == "failed":
        first.sink.on_finished(EndReason.FAILURE, Unavailable(pb.ENGINE_FAILED, "engine"))
    else:
        first.sink.on_finished(EndReason.CANCEL, None)
    await settle()
    assert list(unpack_u32(case.placed.placement.resumed_token_ids)) == [1, 2]
    case.placed.generate(3)
    case.placed.sink.on_finished(EndReason.STOP, None)
    await settle()
    case.events.close()
    await case.running
    assert case.events.tokens == [1, 2, 3]
    assert case.receipt.fallbacks == [Fallback.DECODE_RESUMED]
    assert first.cancels == 0


async def test_workers_that_a_request_may_lose_are_bounded() -> None:
    case = await started(place_attempts=2)
    case.placed.sink.on_lost(LOST)
    await settle()
    case.placed.sink.on_lost(LOST)
    assert await case.failure() is LOST
    assert case.events.drops == 1


async def test_spent_time_is_not_spent_again_elsewhere() -> None:
    case = await started()
    case.placed.sink.on_finished(EndReason.FAILURE, Interrupted(pb.DEADLINE_EXCEEDED, "late"))
    assert (await case.failure()).code == pb.DEADLINE_EXCEEDED
    assert len(case.decode.placed) == 1


async def test_full_answer_whose_end_was_lost_is_finished_without_a_worker() -> None:
    case = await started()
    case.placed.generate(*range(8))
    case.placed.sink.on_lost(LOST)
    await settle()
    assert [ending.reason for ending in case.events.endings] == [EndReason.LENGTH]
    assert len(case.decode.placed) == 1
    case.events.close()
    await case.running


async def test_answer_that_filled_the_context_is_finished_without_a_worker() -> None:
    prompt = replace(PROMPT, max_tokens=None)
    model = replace(PLAN.model, max_context_tokens=13)
    case = await started(replace(PLAN, prompt=prompt, model=model))
    case.placed.generate(1, 2)
    case.placed.sink.on_lost(LOST)
    await settle()
    assert len(case.decode.placed) == 2  # one more token has room
    case.placed.generate(3)
    case.placed.sink.on_lost(LOST)
    await settle()
    assert [ending.reason for ending in case.events.endings] == [EndReason.LENGTH]
    assert len(case.decode.placed) == 2
    case.events.close()
    await case.running


@pytest.mark.parametrize(
    ("promised_blocks", "hit_tokens", "is_lost"),
    [
        (0, 0, False),
        (1, 4, False),
        (1, 1, False),
        (1, 0, True),
        (2, 8, False),
        (2, 5, False),
        (2, 4, True),
        (2, 0, True),
    ],
)
async def test_block_that_was_promised_and_not_found_is_told(
    promised_blocks: int, hit_tokens: int, is_lost: bool
) -> None:
    case = await started(replace(PLAN, promised_blocks=promised_blocks))
    case.placed.sink.on_started(hit_tokens)
    assert case.receipt.fallbacks == [Fallback.HIT_LOST] * is_lost
    case.running.cancel()
    await settle()


async def test_block_with_the_last_token_is_not_expected_of_decode() -> None:
    prompt = replace(PROMPT, token_ids=pack_u32(range(8)))
    case = await started(replace(PLAN, prompt=prompt, promised_blocks=2))
    case.placed.sink.on_started(4)
    assert case.receipt.fallbacks == []
    case.running.cancel()
    await settle()


async def test_hit_of_a_resumed_answer_is_not_judged() -> None:
    case = await started(replace(PLAN, promised_blocks=2))
    case.placed.sink.on_lost(LOST)
    await settle()
    case.placed.sink.on_started(0)
    assert case.receipt.fallbacks == [Fallback.DECODE_RESUMED]
    case.running.cancel()
    await settle()


async def test_lost_tokenizer_goes_on_elsewhere_where_the_client_is() -> None:
    case = await started()
    first = case.events
    case.placed.generate(1, 2)
    first.write()
    case.placed.generate(3)
    first.sink.on_failed(LOST)
    case.placed.generate(4)
    await settle()
    second = case.events
    assert second is not first
    assert case.tokenizers.avoided[-1] == {"tokenizer-0"}
    assert list(unpack_u32(second.opening.prior_token_ids)) == [1, 2]
    assert second.opening.is_resumed
    assert second.opening.prior_events == 1
    assert second.tokens == [3, 4]
    case.placed.sink.on_finished(EndReason.STOP, None)
    await settle()
    second.close()
    await case.running
    assert case.receipt.fallbacks == [Fallback.TOKENIZER_RESUMED]


async def test_tokenizer_lost_after_the_end_is_told_the_end_again() -> None:
    case = await started()
    case.placed.generate(1)
    case.placed.sink.on_finished(EndReason.LENGTH, None)
    await settle()
    case.events.sink.on_failed(LOST)
    await settle()
    assert case.events.tokens == [1]
    assert [ending.reason for ending in case.events.endings] == [EndReason.LENGTH]
    case.events.close()
    await case.running


async def test_tokenizers_that_a_request_may_lose_are_bounded() -> None:
    case = await started(event_attempts=2)
    for _ in range(2):
        case.events.sink.on_failed(LOST)
        await settle()
    assert await case.failure() is LOST
    assert case.placed.cancels == 1


async def test_client_that_does_not_read_ends_its_request_alone() -> None:
    case = await started()
    case.client.room = 1
    for token in (1, 2, 3):
        case.placed.generate(token)
        case.events.write()
    error = await case.failure()
    assert error.code == pb.CANCELLED
    assert (case.placed.cancels, case.events.drops) == (1, 1)
    assert not await case.answer.tell_end(EndReason.FAILURE, error)


async def test_ending_it_from_outside_stops_both_peers_once() -> None:
    case = await started()
    case.placed.generate(1)
    case.running.cancel()
    await settle()
    assert case.running.cancelled()
    case.answer.abort()
    assert (case.placed.cancels, case.events.drops) == (1, 1)


async def test_failure_after_the_head_is_written_by_the_tokenizer() -> None:
    case = Case()
    await settle()
    telling = asyncio.create_task(case.answer.tell_end(EndReason.FAILURE, LOST))
    await settle()
    [ending] = case.events.endings
    assert (ending.reason, ending.failure) == (EndReason.FAILURE, LOST)
    case.events.sink.on_closed(0, None)
    case.running.cancel()
    await settle()
    telling.cancel()


async def test_placement_that_ends_at_once_is_not_missed() -> None:
    case = Case()
    await asyncio.sleep(0)
    while not case.decode.placed:
        await asyncio.sleep(0)
    case.placed.generate(1)
    case.placed.sink.on_finished(EndReason.STOP, None)
    await settle()
    assert case.events.tokens == [1]
    assert len(case.events.endings) == 1
    case.events.close()
    await case.running


class Keeping:
    """Keeps nothing before it is let."""

    def __init__(self, case: Case) -> None:
        self.kept: list[bytes] = []
        self.may_keep = asyncio.Event()
        case.answer.keep = self.keep

    async def keep(self, body: bytes) -> None:
        await self.may_keep.wait()
        self.kept.append(body)


async def test_last_events_wait_until_the_response_is_kept() -> None:
    case = await started()
    keeping = Keeping(case)
    case.placed.generate(1)
    case.events.write()
    case.placed.sink.on_finished(EndReason.STOP, None)
    await settle()
    case.events.sink.on_events(b"last", 1, 2)
    case.events.close(b"response")
    await settle()
    assert case.client.events == [b"event"]
    assert not case.running.done()
    keeping.may_keep.set()
    await case.running
    assert case.client.events == [b"event", b"last"]
    assert keeping.kept == [b"response"]


async def test_answer_that_is_not_kept_waits_for_nothing() -> None:
    case = await started()
    case.placed.sink.on_finished(EndReason.STOP, None)
    await settle()
    case.events.sink.on_events(b"last", 0, 1)
    assert case.client.events == [b"last"]
    case.events.close()
    await case.running


async def test_held_events_go_out_before_the_gateway_tells_a_failure_itself() -> None:
    case = await started(event_attempts=1)
    Keeping(case)
    case.placed.generate(1)
    case.placed.sink.on_finished(EndReason.STOP, None)
    await settle()
    case.events.sink.on_events(b"token", 1, 1)
    case.events.sink.on_failed(LOST)
    error = await case.failure()
    assert case.client.events == []
    telling = asyncio.create_task(case.answer.tell_end(EndReason.FAILURE, error))
    await settle()
    case.events.sink.on_failed(LOST)
    assert not await telling
    assert case.client.events == [b"token"]


async def test_cancelled_answer_is_told_to_a_tokenizer_that_writes_what_is_kept() -> None:
    case = await started()
    keeping = Keeping(case)
    keeping.may_keep.set()
    case.placed.generate(1, 2)
    case.events.write()
    case.placed.generate(3)
    case.running.cancel()
    await settle()
    assert (case.placed.cancels, case.events.drops) == (1, 1)
    telling = asyncio.create_task(case.answer.tell_end(EndReason.CANCEL))
    await settle()
    assert list(unpack_u32(case.events.opening.prior_token_ids)) == [1, 2]
    assert case.events.tokens == [3]
    assert [ending.reason for ending in case.events.endings] == [EndReason.CANCEL]
    case.events.close(b"cancelled")
    assert await telling
    assert keeping.kept == [b"cancelled"]


async def test_end_that_came_before_the_cancel_stays() -> None:
    case = await started()
    keeping = Keeping(case)
    keeping.may_keep.set()
    case.placed.sink.on_finished(EndReason.STOP, None)
    await settle()
    case.running.cancel()
    case.events.close(b"completed")  # both in one turn
    await settle()
    assert await case.answer.tell_end(EndReason.CANCEL)
    assert keeping.kept == [b"completed"]
    assert len(case.tokenizers.opened) == 1


@pytest.mark.parametrize("is_constrained", [False, True])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_only_an_engine_that_began_a_grammar_can_go_on_with_it(tokens: int, is_constrained: bool) -> None:
    case = await started(replace(PLAN, prompt=replace(PROMPT, is_constrained=is_constrained)))
    case.placed.generate(*range(tokens))
    case.placed.sink.on_lost(LOST)
    await settle()
    if tokens and is_constrained:
        assert await case.failure() is LOST
        assert len(case.decode.placed) == 1
        return
    assert len(case.decode.placed) == 2
    case.running.cancel()
    await settle()


@pytest.mark.parametrize(
    ("shown", "is_stopped", "not_shown"), [(3, False, 0), (2, False, 1), (4, True, -1), (2, True, 0)]
)
async def test_tokens_of_an_answer_that_its_usage_does_not_tell(shown: int, is_stopped: bool, not_shown: int) -> None:
    case = await started()
    case.placed.generate(1, 2, 3)
    if is_stopped:
        case.events.sink.on_stopped()
    else:
        case.placed.sink.on_finished(EndReason.STOP, None)
    await settle()
    case.events.sink.on_closed(shown, None)
    await case.running
    assert case.receipt.tokens_not_shown == not_shown


async def test_client_that_does_not_take_the_last_events_is_told_so() -> None:
    case = await started()
    keeping = Keeping(case)
    case.placed.generate(1)
    case.placed.sink.on_finished(EndReason.STOP, None)
    await settle()
    case.events.write()
    case.client.room = 0
    case.events.close(b"response")
    keeping.may_keep.set()
    assert (await case.failure()).code == pb.CANCELLED
    assert keeping.kept == [b"response"]


async def test_last_events_are_not_lost_when_keeping_is_cut() -> None:
    case = await started()
    Keeping(case)
    case.placed.generate(1)
    case.placed.sink.on_finished(EndReason.STOP, None)
    await settle()
    case.events.write()
    case.events.close(b"response")
    await settle()
    assert case.client.events == []
    case.running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await case.running
    assert await case.answer.tell_end(EndReason.CANCEL)
    assert case.client.events == [b"event"]
