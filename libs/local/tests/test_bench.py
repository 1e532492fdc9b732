"""The load that `shoal bench` makes, and the sums that it shows."""

import asyncio
import json
import random

import httpx
import pytest

from shoal_local.bench import BenchOptions, Load, conversation_lengths, new_prompt
from shoal_local.bench_report import Measured, Sample, bench_tables, percentile
from shoal_local.terminal import as_text


def an_answer(request):
    """Caches whatever was sent in an earlier turn."""
    sent = json.loads(request.content)["messages"]
    usage = {
        "prompt_tokens": 100 * len(sent),
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 100 * (len(sent) - 1)},
    }
    events = [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in ("a", "b")]
    events.append({"choices": [], "usage": usage})
    return httpx.Response(200, content="".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n")


@pytest.fixture
def run():
    """Runs a load against a gateway that answers by ``handle``; returns what was measured and what was asked."""

    async def run(handle=an_answer, **options):
        asked, measured = [], Measured()

        def keep(request):
            asked.append(json.loads(request.content))
            return handle(request)

        async with httpx.AsyncClient(transport=httpx.MockTransport(keep), base_url="http://gateway") as http:
            await Load(http, BenchOptions(url="http://gateway", **options), "tiny", measured, lambda: None).run()
        return measured, asked

    return run


async def test_every_conversation_takes_its_turns(run):
    measured, asked = await run(requests=5, turns=2, concurrency=2, max_tokens=9)
    assert sorted(sample.turn for sample in measured.samples) == [1, 1, 1, 2, 2]
    assert sorted(len(body["messages"]) for body in asked) == [1, 1, 1, 3, 3]
    assert {body["max_tokens"] for body in asked} == {9}
    assert sorted(sample.cached_tokens for sample in measured.samples) == [0, 0, 0, 200, 200]


async def test_no_more_conversations_than_asked_for_run_at_once(run):
    busy, most = 0, 0

    async def handle(request):
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0)
        busy -= 1
        return an_answer(request)

    measured = Measured()
    options = BenchOptions(url="http://gateway", requests=12, turns=1, concurrency=3)
    async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://gateway") as http:
        await Load(http, options, "tiny", measured, lambda: None).run()
    assert (most, len(measured.samples)) == (3, 12)


async def test_an_error_ends_its_conversation_only(run):
    calls = iter(range(100))

    def handle(request):
        if next(calls) == 0:
            return httpx.Response(503, json={"error": {"message": "full", "code": "overloaded"}})
        return an_answer(request)

    measured, _ = await run(handle, requests=6, turns=2, concurrency=1)
    assert (len(measured.samples), measured.failures) == (4, {"overloaded": 1})
    shown = as_text(bench_tables(measured, 6))
    assert "1 error: overloaded\nfull\nToo much runs now" in shown
    assert "1 request not answered" in shown


def test_the_last_conversation_may_be_shorter():
    assert list(conversation_lengths(5, 2)) == [2, 2, 1]
    assert list(conversation_lengths(1, 4)) == [1]


def test_prompts_of_two_conversations_share_no_beginning():
    dice = random.Random(1)
    first, second = new_prompt(300, dice), new_prompt(300, dice)
    assert len(first.split()) == 300
    assert first.split()[:20] != second.split()[:20]


def a_sample(turn=1, **changes):
    given = {"prompt_tokens": 300, "cached_tokens": 0, "completion_tokens": 10, "ttft_s": 1.0, "token_s": 0.05}
    return Sample(turn=turn, **(given | changes))


def row(text, name):
    [line] = [line for line in text.splitlines() if line.startswith(name)]
    return line.removeprefix(name).split()


def test_first_turns_and_later_ones_are_shown_apart():
    samples = [a_sample(ttft_s=float(second)) for second in range(1, 21)]
    samples += [a_sample(2, prompt_tokens=400, cached_tokens=300, ttft_s=0.5, token_s=0.1)]
    text = as_text(bench_tables(Measured(samples, wall_s=10.0), 21))
    assert row(text, "requests") == ["20", "1"]
    assert row(text, "first token, p50") == ["10.00", "s", "0.50", "s"]
    assert row(text, "first token, p95") == ["19.00", "s", "0.50", "s"]
    assert row(text, "first token, max") == ["20.00", "s", "0.50", "s"]
    assert row(text, "each token after, p50") == ["50", "ms", "100", "ms"]
    assert "21 requests in 10.0 s: 2.10 a second" in text
    assert "210 tokens out: 21.0 a second" in text


def test_the_cached_share_is_a_ratio_of_sums():
    samples = [a_sample(2, prompt_tokens=100, cached_tokens=0), a_sample(2, prompt_tokens=900, cached_tokens=900)]
    assert row(as_text(bench_tables(Measured(samples), 2)), "cached of them") == ["90.0", "%"]


def test_nothing_measured_is_no_table():
    text = as_text(bench_tables(Measured(), 8))
    assert text == "8 requests not answered: stopped, or after an error in their conversation"


@pytest.mark.parametrize(("part", "value"), [(0.0, 1), (0.5, 2), (0.95, 4), (1.0, 4)])
def test_a_percentile_is_a_measured_value(part, value):
    assert percentile([4, 1, 3, 2], part) == value
    assert percentile([], part) is None


async def test_an_answer_without_usage_is_a_failure_and_not_a_miss(run):
    def without_usage(request):
        event = {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}
        return httpx.Response(200, content=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    measured, _ = await run(without_usage, requests=1, concurrency=1, turns=1)
    assert (measured.samples, list(measured.failures)) == ([], ["no_usage"])
