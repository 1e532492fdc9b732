"""Several answers to one prompt: one end for all of them."""

import asyncio
from dataclasses import replace

import pytest

from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.ports import EndReason, Fallback
from shoal_gateway.request import (
    Choice,
)
from shoal_testkit import settle

from .stream_case import LOST, PLAN, PROMPT, started

THREE = replace(PLAN, prompt=replace(PROMPT, other_choices=(Choice(b"", b"second"), Choice(b"", b"third"))))


async def test_first_of_several_answers_ends_last_with_what_was_kept_of_the_others() -> None:
    case = await started(THREE)
    assert [placed.placement.request_id for placed in case.decode.placed] == ["r1", "r1-1", "r1-2"]
    assert [opened.opening.output_state for opened in case.tokenizers.opened] == [b"state", b"second", b"third"]
    for placed in case.decode.placed:
        placed.generate(1, 2)
    for placed in case.decode.placed:
        placed.sink.on_finished(EndReason.STOP, None)
    await settle()
    first, *others = case.tokenizers.opened
    assert first.endings == [] and [len(other.endings) for other in others] == [1, 1]
    others[1].close(b"[3]")
    await settle()
    assert first.endings == []
    others[0].close(b"[2]")
    await settle()
    [ending] = first.endings
    assert ending.other_choices == (b"[2]", b"[3]")
    assert ending.receipt_json is not None and b'"completion_tokens":6' in ending.receipt_json
    first.close()
    await case.running
    assert case.receipt.completion_tokens == 6


async def test_tokenizer_that_is_lost_before_the_others_ended_is_replaced() -> None:
    case = await started(THREE)
    for placed in case.decode.placed:
        placed.generate(1)
        placed.sink.on_finished(EndReason.LENGTH, None)
    await settle()
    first, *others = case.tokenizers.opened
    first.sink.on_failed(LOST)
    for other in others:
        other.close(b"[]")
    await settle()
    assert case.events is not first and case.events.tokens == [1]
    assert [ending.reason for ending in case.events.endings] == [EndReason.LENGTH]
    case.events.close()
    await case.running
    assert case.receipt.fallbacks == [Fallback.TOKENIZER_RESUMED]


async def test_answer_that_fails_ends_the_others() -> None:
    case = await started(THREE, place_attempts=1)
    case.decode.placed[1].sink.on_lost(LOST)
    assert await case.failure() is LOST
    assert case.running.cancelling() == 0  # time-outs around it would take the mark for another's
    assert [placed.cancels for placed in case.decode.placed] == [1, 0, 1]
    assert [opened.drops for opened in case.tokenizers.opened] == [1, 1, 1]


async def test_client_that_leaves_ends_every_answer() -> None:
    case = await started(THREE)
    case.running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await case.running
    assert [placed.cancels for placed in case.decode.placed] == [1, 1, 1]
    assert [opened.drops for opened in case.tokenizers.opened] == [1, 1, 1]


@pytest.mark.parametrize(("kept", "code"), [(b"", pb.BUG), (b"x" * 7_000_000, pb.INVALID_REQUEST)])
async def test_others_that_cannot_be_summed_up_fail_the_request(kept: bytes, code: int) -> None:
    case = await started(THREE)
    for placed in case.decode.placed:
        placed.generate(1)
        placed.sink.on_finished(EndReason.STOP, None)
    await settle()
    for other in case.tokenizers.opened[1:]:
        other.close(kept)
    assert (await case.failure()).code == code
