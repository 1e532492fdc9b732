"""A process is told to leave: it finishes or hands over what runs, and nothing is lost."""

import asyncio

import pytest

from shoal_testkit.answers import ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import Cluster

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]


TOKENS = 80
LONG_TOKENS = 240  # takes longer than a drain may


@pytest.mark.parametrize("name", ["decode-1", "tokenizer-1", "prefill-1", "kvindex"])
async def test_nothing_is_lost(cluster: Cluster, chat: ChatApi, name: str) -> None:
    prompts = [a_prompt(40) for _ in range(4)]
    streaming = [chat.ask(prompt, TOKENS) for prompt in prompts]
    for answer in streaming:
        await answer.has_begun()
    computing = [chat.ask(a_prompt(500), 10) for _ in range(2)]
    await cluster.whose("prefill")
    cluster.terminate(name)
    later = [chat.ask(a_prompt(200), 10) for _ in range(2)]
    for answer in streaming:
        assert_whole(await answer.read(), TOKENS)
    for answer in (*computing, *later):
        assert_whole(await answer.read(), 10)
    assert await cluster.left(name) == 0
    undisturbed = await chat.read_all(prompts, TOKENS)
    assert [answer.text for answer in streaming] == [answer.text for answer in undisturbed]


async def test_a_stream_that_outlasts_the_drain_goes_on_elsewhere(cluster: Cluster, chat: ChatApi) -> None:
    prompt = a_prompt(40)
    answer = chat.ask(prompt, LONG_TOKENS)
    await answer.has_begun()
    leaving = await cluster.whose("decode")
    cluster.terminate(leaving)
    await answer.read()

    assert_whole(answer, LONG_TOKENS)
    assert answer.receipt["decode"]["instance_id"] != leaving
    assert answer.receipt["fallbacks"] == ["decode_resumed"]
    assert await cluster.left(leaving) == 0
    assert (await chat.ask(prompt, LONG_TOKENS).read()).text == answer.text


async def test_a_gateway_finishes_what_it_has(cluster: Cluster, chat: ChatApi) -> None:
    answers = [chat.ask(a_prompt(40), TOKENS, is_stream=is_stream) for is_stream in (True, False)]
    await answers[0].has_begun()
    cluster.terminate("gateway")
    for answer in answers:
        assert_whole(await answer.read(), TOKENS)
    assert await cluster.left("gateway") == 0
    await asyncio.wait_for(cluster.is_idle(), 10)
