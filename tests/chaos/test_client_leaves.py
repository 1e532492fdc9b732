"""The client leaves: one abort reaches the engine, at once, also for non-streaming calls; nothing stays."""

import asyncio
import random
import time
from datetime import datetime
from typing import Any

import pytest

from shoal_testkit.answers import ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import MODEL, Cluster
from shoal_testkit.plain_client import send_chat

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]


ABORTED_S = 0.25
THOUSAND = 1000
AT_ONCE = 30
TOKENS = 12
LEFT_S = 0.8  # some have their whole answer by then
BOUND_S = 2.0  # what a busy machine may take; the design's number is printed beside
WORKERS = {"decode": ("decode-1", "decode-2"), "prefill": ("prefill-1", "prefill-2")}
SETTLED = {"decode": "stream.settled", "prefill": "job.settled"}


async def _settled(cluster: Cluster, role: str, known: int) -> dict[str, Any]:
    """The line with which a worker of ``role`` ended the request; there must be one."""
    deadline_s = time.monotonic() + BOUND_S
    while len(lines := cluster.lines(*WORKERS[role], event=SETTLED[role])) == known:
        assert time.monotonic() < deadline_s, "nothing was aborted"
        await asyncio.sleep(0.02)
    await cluster.is_idle()
    lines = cluster.lines(*WORKERS[role], event=SETTLED[role])[known:]
    assert [line["outcome"] for line in lines] == ["cancelled"]
    return lines[0]


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_one_abort_reaches_the_worker(cluster: Cluster, chat: ChatApi, stage: str, is_stream: bool) -> None:
    aborts = {role: len(cluster.lines(*WORKERS[role], event=SETTLED[role])) for role in WORKERS}
    answer = chat.ask(a_prompt(3000 if stage == "prefill" else 40), 1000, is_stream=is_stream)
    await cluster.whose(stage)
    if stage == "decode" and is_stream:
        await answer.has_begun()
    left_at_s = await answer.leave()

    line = await _settled(cluster, stage, aborts[stage])
    took_s = datetime.fromisoformat(line["at"]).timestamp() - left_at_s
    print(f"aborted after {1000 * took_s:.0f} ms (design: {1000 * ABORTED_S:.0f} ms)")
    assert took_s < BOUND_S
    other = "decode" if stage == "prefill" else "prefill"
    assert len(cluster.lines(*WORKERS[other], event=SETTLED[other])) == aborts[other]
    settled = cluster.lines("gateway", event="request.settled", request_id=line["request_id"])
    assert [told["outcome"] for told in settled] == ["cancelled"]


async def test_a_thousand_leave_at_any_moment(cluster: Cluster) -> None:
    """Each is settled once; what was still running is aborted, and nothing else."""
    known = {role: len(cluster.lines(*WORKERS[role], event=SETTLED[role])) for role in WORKERS}
    settled = len(cluster.lines("gateway", event="request.settled"))
    places = asyncio.Semaphore(AT_ONCE)

    async def leave(number: int) -> None:
        async with places:
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": a_prompt(20)}],
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "stream": number % 2 == 0,
            }
            _, writer = await send_chat(cluster.url, body)
            await asyncio.sleep(random.uniform(0.0, LEFT_S))
            writer.transport.abort()

    await asyncio.gather(*(leave(number) for number in range(THOUSAND)))
    await cluster.is_idle()
    lines = cluster.lines("gateway", event="request.settled")[settled:]
    ids = [line["request_id"] for line in lines]
    assert len(ids) == len(set(ids))
    assert THOUSAND // 10 < len(ids) <= THOUSAND  # who left before the request was there asked nothing
    ended = cluster.lines(*WORKERS["decode"], event=SETTLED["decode"])[known["decode"] :]
    assert len({line["request_id"] for line in ended}) == len(ended)
    cancelled = {line["request_id"] for line in ended if line["outcome"] == "cancelled"}
    finished = {line["request_id"] for line in lines if line["outcome"] == "finished"}
    assert not cancelled & finished, "an abort reached a request that had finished"
    print(f"{len(ids)} asked, {len(finished)} had finished, {len(cancelled)} aborted at decode")
    for worker in WORKERS["decode"]:
        assert await cluster.metric(worker, "shoal_decode_running_requests") == 0


async def test_many_leave_at_once_and_those_who_stay_lose_nothing(cluster: Cluster, chat: ChatApi) -> None:
    prompt = a_prompt(40)
    staying = [chat.ask(prompt, 100) for _ in range(3)]
    leaving = [chat.ask(a_prompt(40), 1000, is_stream=number % 2 == 0) for number in range(8)]
    for answer in staying:
        await answer.has_begun()
    await asyncio.gather(*(answer.leave() for answer in leaving))
    for answer in staying:
        assert_whole(await answer.read(), 100)
    assert len({answer.text for answer in staying}) == 1
    await cluster.is_idle()
