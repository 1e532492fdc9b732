"""What a probe's receipt says about each stage."""

import json
from typing import Any, cast

import pytest

from shoal_gateway.lifecycle import River
from shoal_gateway.ports import Fallback
from shoal_gateway.readiness import FAILED_KEEP_S, ProbeLimits, ReadinessProbe, ReadinessReport, _body, judge
from shoal_gateway.receipt import DecodePart, PrefillPart, Receipt
from shoal_gateway.request import ServedModel
from shoal_gateway.steps.stream import StreamLimits
from shoal_testkit import VirtualClock

BLOCK = 16
# A probe waits for nobody, stores nothing, and may be refused by a worker that is full.
NOT_OF_A_PROBE = {Fallback.PLACEMENT_REFUSED, Fallback.AFFINITY_MISSED, Fallback.RESPONSE_NOT_STORED}


def a_receipt(*fallbacks: Fallback, stored: str = "yes", decode_hit: int = 2 * BLOCK) -> Receipt:
    decode = DecodePart("d", 1, decode_hit)
    receipt = Receipt("r1", prompt_tokens=2 * BLOCK + 5, prefill=PrefillPart("w", 1, stored=stored), decode=decode)
    receipt.fallbacks.extend(fallbacks)
    return receipt


def test_whole_way_is_ready() -> None:
    report = judge(a_receipt(), BLOCK)
    assert report.is_ready
    assert report.stage is None


def test_refused_placement_that_went_elsewhere_is_still_ready() -> None:
    assert judge(a_receipt(Fallback.PLACEMENT_REFUSED), BLOCK).is_ready


@pytest.mark.parametrize(
    ("receipt", "stage"),
    [
        (a_receipt(Fallback.INDEX_UNKNOWN), "kvindex"),
        (a_receipt(Fallback.NATS_AWAY), "nats"),
        (a_receipt(Fallback.NO_PREFILL_WORKER), "prefill"),
        (a_receipt(Fallback.STORE_UNKNOWN), "store"),
        (a_receipt(Fallback.PREFILL_FAILED, Fallback.INDEX_UNKNOWN), "kvindex"),
        (a_receipt(stored="none"), "prefill"),
        (a_receipt(Fallback.HIT_LOST), "store"),
        (a_receipt(decode_hit=0), "store"),
        (a_receipt(decode_hit=2 * BLOCK - 1), "store"),
    ],
)
def test_first_stage_that_did_not_do_its_part_is_named(receipt: Receipt, stage: str) -> None:
    report = judge(receipt, BLOCK)
    assert not report.is_ready
    assert report.stage == stage
    assert report.fields()["reason"]


def test_first_block_in_the_engines_own_cache_does_not_stand_for_the_store() -> None:
    assert judge(a_receipt(decode_hit=BLOCK), BLOCK).stage == "store"


def test_last_token_is_always_computed() -> None:
    receipt = a_receipt(decode_hit=BLOCK)
    receipt.prompt_tokens = 2 * BLOCK
    assert judge(receipt, BLOCK).is_ready


def test_every_fallback_but_a_refusal_is_a_failed_probe() -> None:
    failed = {fallback for fallback in Fallback if not judge(a_receipt(fallback), BLOCK).is_ready}
    assert failed == set(Fallback) - NOT_OF_A_PROBE


async def test_failure_is_looked_at_again_sooner_than_a_success_would_be() -> None:
    clock, unused, asked = VirtualClock(), cast(Any, None), []

    class NoDecode:
        def models(self) -> list[ServedModel]:
            asked.append(clock.monotonic())
            return []

    river = River(*[unused] * 7, clock, StreamLimits(1, 1, 1.0), 60.0, unused, unused)
    probe = ReadinessProbe(river, cast(Any, NoDecode()), ProbeLimits(keep_s=30.0, probe_s=1.0), clock, lambda: "r1")
    assert (await probe.check()).stage == "decode"
    await clock.advance(FAILED_KEEP_S)
    assert (await probe.check()).age_s == FAILED_KEEP_S
    assert len(asked) == 1
    await clock.advance(0.1)
    assert (await probe.check()).age_s == 0
    assert len(asked) == 2


async def test_a_success_is_over_when_no_decode_worker_is_left() -> None:
    clock, unused = VirtualClock(), cast(Any, None)

    class Decode:
        def __init__(self) -> None:
            self.served = [ServedModel("m", "pool", BLOCK, 1000)]

        def models(self) -> list[ServedModel]:
            return self.served

    class Probe(ReadinessProbe):
        async def _probe(self) -> ReadinessReport:
            return ReadinessReport(bool(decode.served))

    decode = Decode()
    river = River(*[unused] * 7, clock, StreamLimits(1, 1, 1.0), 60.0, unused, unused)
    probe = Probe(river, cast(Any, decode), ProbeLimits(keep_s=30.0, probe_s=1.0), clock, lambda: "r1")
    assert (await probe.check()).is_ready
    await clock.advance(10.0)
    assert (await probe.check()).age_s == 10.0
    decode.served = []
    assert not (await probe.check()).is_ready


def test_prompts_share_their_beginning_and_nothing_after_the_nonce() -> None:
    model = ServedModel("m", "pool", BLOCK, 1000)
    first, second = (json.loads(_body(model, nonce))["messages"][0]["content"] for nonce in ("aaa", "bbb"))
    words = first.split()
    assert words[:BLOCK] == second.split()[:BLOCK]
    assert (words[BLOCK], second.split()[BLOCK]) == ("aaa", "bbb")
    assert len(words) >= 2 * BLOCK
