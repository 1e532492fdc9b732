"""kvindex is down: requests go on with an unknown hit; after its return hits are known again."""

import pytest

from shoal_testkit.answers import ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import Cluster

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]


TOKENS = 10


async def test_hits_are_unknown_meanwhile_and_known_after_its_return(cluster: Cluster, chat: ChatApi) -> None:
    prompt = a_prompt(300)
    first = await chat.ask(prompt, TOKENS).read()
    known = await chat.ask(prompt, TOKENS).read()
    assert known.receipt["matched_tokens"] >= 256
    assert known.receipt["fallbacks"] == []

    cluster.kill("kvindex")
    meanwhile = await chat.ask(prompt, TOKENS).read()
    assert_whole(meanwhile, TOKENS)
    assert "matched_tokens" not in meanwhile.receipt
    assert meanwhile.receipt["fallbacks"] == ["index_unknown"]
    assert meanwhile.receipt["hit_tokens"] == known.receipt["hit_tokens"]
    cold = await chat.ask(a_prompt(300), TOKENS).read()
    assert_whole(cold, TOKENS)
    assert cold.receipt["fallbacks"] == ["index_unknown", "store_unknown"]
    assert cold.receipt["decode"]["hit_tokens"] >= 256

    await cluster.start("kvindex")
    await cluster.serves_well()
    again = await chat.ask(prompt, TOKENS).read()
    assert again.receipt["matched_tokens"] == known.receipt["matched_tokens"]
    assert again.receipt["fallbacks"] == []
    assert first.text == meanwhile.text == again.text


async def test_a_running_stream_does_not_notice(cluster: Cluster, chat: ChatApi) -> None:
    answer = chat.ask(a_prompt(40), 60)
    await answer.has_begun()
    cluster.kill("kvindex")
    assert_whole(await answer.read(), 60)
    assert answer.receipt["fallbacks"] == []
