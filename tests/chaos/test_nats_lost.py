"""NATS is down: streams go on, decode computes new prompts where it has room; afterwards all is as before."""

import asyncio

import pytest

from shoal_testkit.answers import ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import MAX_DECODING, Cluster

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]


TOKENS = 10


async def test_streams_go_on_and_new_requests_are_computed_by_decode(cluster: Cluster, chat: ChatApi) -> None:
    streaming = chat.ask(a_prompt(40), 150)
    await streaming.has_begun()
    cluster.kill("nats")
    prompt = a_prompt(300)
    local = await chat.ask(prompt, TOKENS).read()
    assert_whole(local, TOKENS)
    assert "nats_away" in local.receipt["fallbacks"]
    assert "instance_id" not in local.receipt.get("prefill", {})
    assert_whole(await streaming.read(), 150)
    assert streaming.receipt["fallbacks"] == []

    await cluster.start("nats")
    await cluster.serves_well()
    fresh = await chat.ask(a_prompt(300), TOKENS).read()
    assert_whole(fresh, TOKENS)
    assert fresh.receipt["fallbacks"] == []
    assert fresh.receipt["prefill"]["stored"] == "yes"
    assert (await chat.ask(prompt, TOKENS).read()).text == local.text


async def test_without_room_on_decode_new_requests_are_refused(cluster: Cluster, chat: ChatApi) -> None:
    # Half a minute of tokens: longer than the gateway looks for NATS and then waits for room.
    filling = [chat.ask(a_prompt(40), 1500) for _ in range(2 * MAX_DECODING)]
    for answer in filling:
        await answer.has_begun()
    cluster.kill("nats")
    refused = await chat.ask(a_prompt(300), TOKENS, is_stream=False).read()
    assert refused.status == 503
    assert int(refused.headers["retry-after"]) > 0
    for answer in filling:
        assert answer.error is None
        await answer.leave()
    await cluster.is_idle()


async def test_a_job_that_was_forgotten_is_published_again(cluster: Cluster, chat: ChatApi) -> None:
    prompt = a_prompt(900)
    answer = chat.ask(prompt, TOKENS)
    await cluster.whose("prefill")
    cluster.kill("nats")
    await asyncio.sleep(1.0)
    await cluster.start("nats")
    await answer.read()

    assert_whole(answer, TOKENS)
    assert answer.receipt["fallbacks"] == []
    assert answer.receipt["prefill"]["attempts"] == 1
    assert (await chat.ask(prompt, TOKENS).read()).text == answer.text
    await cluster.is_idle()
