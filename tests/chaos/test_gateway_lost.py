"""A gateway dies: its clients' connections break; its jobs and placements are aborted within 3 s."""

import asyncio
import time

import httpx
import pytest

from shoal_testkit.answers import ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import Cluster

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]


ABORTED_S = 3.0
SLACK_S = 2.0  # for a busy machine


async def test_what_it_placed_and_queued_is_aborted(cluster: Cluster, chat: ChatApi) -> None:
    streaming = chat.ask(a_prompt(40), 1000)
    await streaming.has_begun(5)
    computing = chat.ask(a_prompt(3000), 10)
    await cluster.whose("prefill")
    cluster.kill("gateway")
    killed_s = time.monotonic()
    for answer in (streaming, computing):
        with pytest.raises(httpx.HTTPError):
            await answer.read()

    aborted_s: dict[str, float] = {}
    while len(aborted_s) < 2 and time.monotonic() < killed_s + ABORTED_S + SLACK_S:
        running = {name.split("-")[0] for name in await cluster.what_runs()}
        for part in ("decode", "prefill"):
            if part not in running:
                aborted_s.setdefault(part, round(time.monotonic() - killed_s, 2))
    print(f"aborted after: {aborted_s}")
    assert aborted_s.keys() == {"decode", "prefill"}
    await cluster.is_idle()


async def test_a_gateway_that_is_back_at_once_has_left_nothing_behind(cluster: Cluster, chat: ChatApi) -> None:
    lost = chat.ask(a_prompt(3000), 10)
    await cluster.whose("prefill")
    cluster.kill("gateway")
    with pytest.raises(httpx.HTTPError):
        await lost.read()
    await cluster.start("gateway")
    await asyncio.sleep(1.0)  # its first beats
    assert await cluster.what_runs() == {}
    await cluster.serves_well()
    assert_whole(await chat.ask(a_prompt(200), 10).read(), 10)


async def test_a_gateway_that_was_only_frozen_answers_all_the_same(cluster: Cluster, chat: ChatApi) -> None:
    prompt = a_prompt(2500)
    answer = chat.ask(prompt, 10)
    worker = await cluster.whose("prefill")
    cluster.freeze("gateway")
    await asyncio.sleep(ABORTED_S + 1.0)
    assert not await cluster.metric(worker, "shoal_prefill_running_jobs")
    cluster.thaw("gateway")
    await answer.read()

    assert_whole(answer, 10)
    assert answer.receipt["fallbacks"][0] == "prefill_repeated"
    assert (await chat.ask(prompt, 10).read()).text == answer.text
    await cluster.is_idle()
