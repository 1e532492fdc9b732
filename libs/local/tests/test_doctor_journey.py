"""From two receipts: where the way of a block breaks. From what a gateway answers: whether it can be asked."""

import json

import httpx
import pytest

from shoal_local.doctor.findings import Verdict
from shoal_local.doctor.journey import check_gateway, check_journey, judge

STORED = {"instance_id": "prefill-1", "stored": "yes"}


def a_receipt(**changes):
    given = {
        "prompt_tokens": 301,
        "matched_tokens": 0,
        "hit_tokens": 0,
        "total_ms": 50,
        "prefill": STORED,
        "decode": {"instance_id": "decode-1", "hit_tokens": 256},
        "fallbacks": [],
    }
    return given | changes


AGAIN = a_receipt(matched_tokens=256, hit_tokens=256, prefill=None)


def judged(first, second=AGAIN):
    return {finding.name: finding.verdict.value for finding in judge(first, second)}


def test_a_block_that_went_the_whole_way():
    assert set(judged(a_receipt()).values()) == {"ok"}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # nobody computed it
        (a_receipt(prefill=None, fallbacks=["no_prefill_worker"]), AGAIN, ["wrong", "unknown", "unknown", "ok"]),
        # stored nowhere that others see
        (
            a_receipt(prefill={"instance_id": "p", "stored": "unknown"}, decode={"instance_id": "d", "hit_tokens": 0}),
            AGAIN,
            ["wrong", "unknown", "unknown", "ok"],
        ),
        # in the store, and nobody told the index
        (
            a_receipt(prefill={"instance_id": "p", "stored": "unknown"}),
            a_receipt(matched_tokens=0, hit_tokens=0),
            ["ok", "wrong", "ok", "wrong"],
        ),
        # the index knows, decode does not find it
        (a_receipt(decode={"instance_id": "d", "hit_tokens": 0}), AGAIN, ["ok", "ok", "wrong", "ok"]),
        # only a part of it
        (a_receipt(decode={"instance_id": "d", "hit_tokens": 128}), AGAIN, ["ok", "ok", "wrong", "ok"]),
        # a whole number of blocks: the last token is always computed
        (
            a_receipt(prompt_tokens=256, decode={"instance_id": "d", "hit_tokens": 255}),
            {**AGAIN, "prompt_tokens": 256},
            ["ok", "ok", "ok", "ok"],
        ),
        # the second time
        (a_receipt(), a_receipt(matched_tokens=None), ["ok", "ok", "ok", "wrong"]),
        (a_receipt(), a_receipt(matched_tokens=256, hit_tokens=0), ["ok", "ok", "ok", "wrong"]),
    ],
)
def test_where_it_breaks_is_named(first, second, expected):
    assert list(judged(first, second).values()) == expected
    assert all(finding.advice for finding in judge(first, second) if finding.verdict is Verdict.WRONG)


def answering(**pages):
    """A gateway that answers each path with (status, body, headers)."""

    def respond(request):
        status, body, headers = pages[request.url.path.rsplit("/", 1)[-1]]
        return httpx.Response(status, content=json.dumps(body), headers=headers)

    return httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(respond))


MODELS = (200, {"data": [{"id": "tiny"}]}, {})


@pytest.mark.parametrize(
    ("status", "body", "verdict", "is_usable"),
    [
        (200, {"is_ready": True, "total_ms": 9, "reasons": {}}, "ok", True),
        (200, {"is_ready": True, "reasons": {"nats": "cut off"}}, "warning", True),
        (503, {"is_ready": False, "stage": "store", "reason": "not seen", "reasons": {}}, "wrong", True),
        (503, {"is_ready": False, "stage": "decode", "reason": "no worker", "reasons": {}}, "wrong", False),
        (200, [], "wrong", False),
    ],
)
async def test_the_readiness_of_a_gateway_is_told(status, body, verdict, is_usable):
    async with answering(readyz=(status, body, {}), models=MODELS) as http:
        gateway = await check_gateway(http)
    assert (gateway.finding.verdict.value, gateway.is_usable) == (verdict, is_usable)


async def test_what_stands_before_the_gateways_is_no_other_program():
    nobody = (503, {"error": {"message": "no gateway is ready; try again", "code": "unavailable"}}, {})
    async with answering(readyz=nobody, models=nobody) as http:
        gateway = await check_gateway(http)
    assert (gateway.finding.verdict.value, gateway.is_usable) == ("wrong", False)
    assert "none is ready" in gateway.finding.found and "logs gateway" in gateway.finding.advice


async def test_a_request_that_fails_leaves_its_way_unknown():
    refused = (503, {"error": {"message": "no decode worker is ready"}}, {})
    async with answering(completions=refused) as http:
        findings = await check_journey(http, "tiny", 128)
    assert [finding.verdict.value for finding in findings] == ["wrong", *["unknown"] * 4]
    assert "status 503, no decode worker is ready" in findings[0].found


async def test_an_answer_without_receipt_is_not_taken_for_one_of_ours():
    async with answering(completions=(200, {}, {})) as http:
        findings = await check_journey(http, "tiny", None)
    assert "without its receipt" in findings[0].found


async def test_the_prompt_is_new_each_time_and_the_same_twice():
    prompts = []

    def respond(request):
        prompts.append(json.loads(request.content)["messages"][0]["content"])
        receipt = a_receipt() if len(prompts) % 2 else AGAIN
        return httpx.Response(200, json={}, headers={"x-shoal-receipt": json.dumps(receipt)})

    async with httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(respond)) as http:
        for _ in range(2):
            findings = await check_journey(http, "tiny", 64)
            assert {finding.verdict for finding in findings} == {Verdict.OK}
    assert prompts[0] == prompts[1] != prompts[2]
    assert prompts[0].count(" river") == 128
