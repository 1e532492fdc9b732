"""A tokenizer dies mid-stream: the stream is rebuilt on another replica, and no event comes twice."""

import pytest

from shoal_testkit.answers import ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import Cluster

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]


TOKENS = 80
BEGUN = 20


async def test_streams_go_on_at_another_replica(cluster: Cluster, chat: ChatApi) -> None:
    prompts = [a_prompt(40) for _ in range(6)]
    answers = chat.ask_all(prompts, TOKENS)
    for answer in answers:
        await answer.has_begun(BEGUN)
    cluster.kill(await cluster.whose("tokenizer"))
    for answer in answers:
        await answer.read()
        assert_whole(answer, TOKENS)

    assert any(answer.receipt["fallbacks"] == ["tokenizer_resumed"] for answer in answers)
    for answer, undisturbed in zip(answers, await chat.read_all(prompts, TOKENS), strict=True):
        assert len({(event["id"], event["created"]) for event in answer.events}) == 1
        assert (answer.text, answer.tokens) == (undisturbed.text, undisturbed.tokens)


async def test_a_whole_answer_comes_from_another_replica(cluster: Cluster, chat: ChatApi) -> None:
    prompt = a_prompt(40)
    answer = chat.ask(prompt, TOKENS, is_stream=False)
    cluster.kill(await cluster.whose("tokenizer"))
    await answer.read()

    assert_whole(answer, TOKENS)
    assert answer.receipt["fallbacks"] == ["tokenizer_resumed"]
    assert (await chat.ask(prompt, TOKENS).read()).text == answer.text


async def test_without_any_replica_the_client_is_told_and_nothing_runs_on(cluster: Cluster, chat: ChatApi) -> None:
    await cluster.stop("tokenizer-2")
    answer = chat.ask(a_prompt(40), 1000)
    await answer.has_begun(BEGUN)
    cluster.kill("tokenizer-1")
    await answer.read()

    assert answer.error is not None and answer.error["type"] == "server_error"
    await cluster.is_idle()
    refused = await chat.ask(a_prompt(40), 10).read()
    assert refused.status == 503 and "retry-after" in refused.headers
