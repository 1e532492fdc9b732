"""A prefill worker dies: its job is delivered to another worker, which finds what was already stored."""

import time

import pytest

from shoal_testkit.answers import ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import Cluster

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]


TOKENS = 30
WORDS = 900


async def _kill_while_it_computes(cluster: Cluster) -> str:
    """Kill the worker that has a job, as soon as it has stored something of it."""
    folder = cluster.directory / "blocks"
    before = len(list(folder.iterdir()))
    victim = await cluster.whose("prefill")
    deadline_s = time.monotonic() + 20
    while len(list(folder.iterdir())) == before:
        assert time.monotonic() < deadline_s
    cluster.kill(victim)
    return victim


async def test_another_worker_computes_the_rest(cluster: Cluster, chat: ChatApi) -> None:
    prompt = a_prompt(WORDS)
    answer = chat.ask(prompt, TOKENS)
    victim = await _kill_while_it_computes(cluster)
    await answer.read()

    assert_whole(answer, TOKENS)
    prefill = answer.receipt["prefill"]
    assert prefill["instance_id"] != victim
    assert (prefill["attempts"], prefill["deliveries"]) == (1, 2)
    assert answer.receipt["hit_tokens"] > 0
    assert answer.receipt["fallbacks"] == []
    assert (await chat.ask(prompt, TOKENS).read()).text == answer.text


async def test_the_only_worker_computes_it_after_its_restart(cluster: Cluster, chat: ChatApi) -> None:
    await cluster.stop("prefill-2")
    prompt = a_prompt(WORDS)
    answer = chat.ask(prompt, TOKENS, is_stream=False)
    assert await _kill_while_it_computes(cluster) == "prefill-1"
    await cluster.start("prefill-1")
    await answer.read()

    assert_whole(answer, TOKENS)
    prefill = answer.receipt["prefill"]
    assert (prefill["instance_id"], prefill["deliveries"]) == ("prefill-1", 2)
    assert (await chat.ask(prompt, TOKENS).read()).text == answer.text


async def test_decode_computes_the_prompt_when_no_worker_comes_back(cluster: Cluster, chat: ChatApi) -> None:
    await cluster.stop("prefill-2")
    prompt = a_prompt(WORDS)
    answer = chat.ask(prompt, TOKENS)
    assert await _kill_while_it_computes(cluster) == "prefill-1"
    await answer.read()

    assert_whole(answer, TOKENS)
    assert answer.receipt["fallbacks"] == ["no_prefill_worker"]
    assert "instance_id" not in answer.receipt["prefill"]
    assert (await chat.ask(prompt, TOKENS).read()).text == answer.text
    await cluster.is_idle()  # the job was taken back: a worker that comes later finds nothing to do for nobody
