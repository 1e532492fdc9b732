"""Everything dies at once and is started at once, in no order: the next request works."""

import pytest

from shoal_testkit.answers import ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import Cluster

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]


TOKENS = 10


async def test_the_next_request_works_and_finds_what_was_stored(cluster: Cluster, chat: ChatApi) -> None:
    prompt = a_prompt(300)
    before = await chat.ask(prompt, TOKENS).read()
    await cluster.is_written()
    cluster.kill(*cluster.commands)
    await cluster.start(*cluster.commands)
    await cluster.serves_well()

    after = await chat.ask(prompt, TOKENS).read()
    assert_whole(after, TOKENS)
    assert after.text == before.text
    assert after.receipt["matched_tokens"] >= 256
    assert after.receipt["fallbacks"] == []
