"""Postgres is down: serving goes on, writes wait in bounded memory; after its return they are written."""

import asyncio

import pytest

from shoal_testkit.answers import ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import Cluster

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]


TOKENS = 10


async def test_what_was_stored_meanwhile_is_written_after_its_return(cluster: Cluster, chat: ChatApi) -> None:
    cluster.kill("postgres")
    prompt = a_prompt(300)
    first = await chat.ask(prompt, TOKENS).read()
    assert_whole(first, TOKENS)
    second = await chat.ask(prompt, TOKENS).read()
    assert second.receipt["matched_tokens"] >= 256
    assert first.receipt["fallbacks"] == second.receipt["fallbacks"] == []
    async with asyncio.timeout(10):  # told when the next write fails
        while await cluster.metric("kvindex", "shoal_kvindex_pending_changes") == 0:
            await asyncio.sleep(0.05)

    await cluster.start("postgres")
    await cluster.is_written()
    cluster.kill("kvindex")  # what it knows from now on is what Postgres has
    await cluster.start("kvindex")
    await cluster.serves_well()
    assert (await chat.ask(prompt, TOKENS).read()).receipt["matched_tokens"] == second.receipt["matched_tokens"]
