"""Each process stands still, or is killed, while 50 streams run: none hangs, none loses or repeats a token."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from shoal_testkit.answers import Answer, ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import Cluster, Shape, cluster_running

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(200)]

STREAMS = 50
LATER = 6  # asked while the victim is away
PROMPTS = 10
TOKENS = 120
BEGUN = 15
AWAY_S = 6.0  # longer than silence and every time-out of a peer, shorter than a stream's own patience
BACK_S = 30.0  # the design says 5; printed
SETTINGS = {
    "": {"SHOAL_DRAIN_S": "3"},
    "decode": {
        "SHOAL_SCRIPTED_STEP_MS": "60",
        "SHOAL_DECODE_MAX_RUNNING_REQUESTS": "64",
        "SHOAL_ENGINE_MAX_RUNNING_REQUESTS": "64",
    },
    "prefill": {"SHOAL_SCRIPTED_PREFILL_TOKENS_PER_S": "20000"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_cluster() -> AsyncIterator[Cluster]:
    async with cluster_running(Shape(kvindexes=2), SETTINGS) as cluster:
        yield cluster


async def _begun(chat: ChatApi, prompts: list[str]) -> list[Answer]:
    answers = [chat.ask(prompts[number % PROMPTS], TOKENS) for number in range(STREAMS)]
    await asyncio.gather(*(answer.has_begun(BEGUN, timeout_s=60) for answer in answers))
    return answers


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("victim", ["decode-1", "tokenizer-1", "prefill-1", "kvindex", "nats", "postgres"])
async def test_fifty_streams_go_on(cluster: Cluster, chat: ChatApi, victim: str, is_killed: bool) -> None:
    prompts = [a_prompt(150) for _ in range(PROMPTS)]
    answers = await _begun(chat, prompts)
    if is_killed:
        cluster.kill(victim)
    else:
        cluster.freeze(victim)
    try:
        later = [chat.ask(prompts[number % PROMPTS], TOKENS) for number in range(LATER)]
        await asyncio.sleep(AWAY_S)
    finally:
        if is_killed:
            await cluster.start(victim)
        else:
            cluster.thaw(victim)
    back_s = time.monotonic()
    await cluster.serves_well(timeout_s=BACK_S)
    print(f"{victim} {'killed' if is_killed else 'stopped'}: well {time.monotonic() - back_s:.1f} s after it was back")
    for answer in [*answers, *later]:
        assert_whole(await answer.read(), TOKENS)
    texts = {prompt: {a.text for n, a in enumerate(answers) if n % PROMPTS == p} for p, prompt in enumerate(prompts)}
    for number, answer in enumerate(later):
        texts[prompts[number % PROMPTS]].add(answer.text)
    again = await asyncio.gather(*(chat.ask(prompt, TOKENS).read() for prompt in prompts))
    undisturbed = {prompt: answer.text for prompt, answer in zip(prompts, again, strict=True)}
    assert all(len(said) == 1 for said in texts.values())
    assert all(texts[prompt] == {text} for prompt, text in undisturbed.items())
    await cluster.is_idle()
    settled = {line["request_id"]: line for line in cluster.lines("gateway", event="request.settled")}
    mine = [settled[answer.receipt["request_id"]] for answer in [*answers, *later]]
    assert {line["outcome"] for line in mine} == {"finished"}
