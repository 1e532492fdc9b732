"""One computation for one prefix: chats that come together, through real processes on the scripted engine.

Two prefill workers compute at the same time whatever they are given, so that a prompt given twice is computed twice.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from shoal_contracts.v1 import kvindex_pb2, kvindex_pb2_grpc
from shoal_runtime.grpc import call, connect
from shoal_testkit.answers import Answer, ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import BLOCK_TOKENS, MODEL, PREFILL_TOKENS_PER_S, Cluster, Shape, cluster_running

ANSWER_TOKENS = 4
PROMPT_WORDS = 2900  # about 3,000 tokens; most of ten seconds of computing
SHORT_WORDS = 700

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with cluster_running(Shape(tokenizers=1, prefill=2, decode=2)) as cluster:
        yield cluster


@pytest.fixture
def chat(cluster: Cluster) -> ChatApi:
    return ChatApi(cluster.url, MODEL)


def computed_tokens(answers: list[Answer]) -> int:
    """By prefill workers and, where they found less than whole blocks, by decode workers."""
    return sum(answer.receipt["miss_tokens"] for answer in answers)


async def read_together(chat: ChatApi, prompts: list[str]) -> list[Answer]:
    answers = [chat.ask(prompt, ANSWER_TOKENS, is_stream=False) for prompt in prompts]
    return [await answer.read() for answer in answers]


def owners_and_waiters(answers: list[Answer]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    receipts = [answer.receipt for answer in answers]
    return [one for one in receipts if "shared" not in one], [one for one in receipts if "shared" in one]


@pytest.mark.parametrize("count", [2, 8])
async def test_the_same_prompt_at_the_same_time_is_computed_once(cluster: Cluster, chat: ChatApi, count: int) -> None:
    prompt = a_prompt(PROMPT_WORDS)
    answers = await read_together(chat, [prompt] * count)
    for answer in answers:
        assert_whole(answer, ANSWER_TOKENS)
    assert len({answer.text for answer in answers}) == 1
    [owner], waiters = owners_and_waiters(answers)
    assert len(waiters) == count - 1
    prompt_tokens = owner["prompt_tokens"]
    assert prompt_tokens > 2500
    assert owner["prefill"]["stored"] == "yes"
    for receipt in waiters:
        assert receipt["shared"]["request_id"] == owner["request_id"]
        assert receipt["shared"]["outcome"] == "stored"
        assert receipt["shared"]["waited_ms"] > 1000
        assert receipt["fallbacks"] == []
        assert "prefill" not in receipt
    assert computed_tokens(answers) < prompt_tokens + count * BLOCK_TOKENS


async def test_different_ends_after_the_same_beginning_compute_only_their_ends(chat: ChatApi) -> None:
    beginning = a_prompt(PROMPT_WORDS // 2)
    answers = await read_together(chat, [f"{beginning} {a_prompt(SHORT_WORDS)}" for _ in range(3)])
    owners, waiters = owners_and_waiters(answers)
    assert (len(owners), len(waiters)) == (1, 2)
    assert {receipt["shared"]["outcome"] for receipt in waiters} == {"stored"}
    assert all(receipt["prefill"]["stored"] == "yes" for receipt in waiters)
    shared_tokens = owners[0]["prompt_tokens"] // 2
    assert all(receipt["hit_tokens"] >= shared_tokens for receipt in waiters)


async def test_different_prompts_do_not_wait_for_each_other(chat: ChatApi) -> None:
    answers = await read_together(chat, [a_prompt(SHORT_WORDS) for _ in range(3)])
    assert [receipt.get("shared") for receipt in (answer.receipt for answer in answers)] == [None] * 3


async def test_client_that_leaves_gives_its_prefix_up(cluster: Cluster, chat: ChatApi) -> None:
    prompt = a_prompt(PROMPT_WORDS)
    first = chat.ask(prompt, ANSWER_TOKENS)
    await cluster.whose("prefill")
    second = chat.ask(prompt, ANSWER_TOKENS, is_stream=False)
    await asyncio.sleep(0.3)
    await first.leave()
    receipt = (await second.read()).receipt
    assert receipt["shared"]["outcome"] == "given_up"
    assert receipt["shared"]["waited_ms"] < 3000
    assert receipt["prefill"]["stored"] == "yes"


async def test_prefix_of_a_killed_worker_is_waited_for_no_longer_than_it_takes(cluster: Cluster, chat: ChatApi) -> None:
    """The queue gives the job to the other worker; the waiting request either gets its blocks or computes them."""
    prompt = a_prompt(SHORT_WORDS)
    answers = [chat.ask(prompt, ANSWER_TOKENS, is_stream=False) for _ in range(2)]
    cluster.kill(await cluster.whose("prefill"))
    for answer in answers:
        assert_whole(await answer.read(), ANSWER_TOKENS)
    await cluster.heal()


async def test_claim_of_a_killed_gateway_delays_nobody_for_long(cluster: Cluster, chat: ChatApi) -> None:
    prompt = a_prompt(PROMPT_WORDS)
    left = chat.ask(prompt, ANSWER_TOKENS)
    await cluster.whose("prefill")
    cluster.kill("gateway")
    with contextlib.suppress(httpx.HTTPError):
        await left.read()
    await cluster.heal()
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False) as http:
        probe_ms = (await http.get("/readyz")).json()["total_ms"]  # kept from when it healed
    answer = await chat.ask(prompt, ANSWER_TOKENS, is_stream=False).read()
    assert_whole(answer, ANSWER_TOKENS)
    receipt = answer.receipt
    computing_ms = 1000 * receipt["prompt_tokens"] / PREFILL_TOKENS_PER_S
    # Decision 0012: half as long again as computing takes, with what queue and hand-off took of the one job that this
    # gateway has seen, its own probe.
    assert receipt.get("shared", {"waited_ms": 0})["waited_ms"] <= 1.5 * (computing_ms + probe_ms) + 2000


async def test_next_turn_that_was_changed_is_explained_as_the_receipt_tells_it(cluster: Cluster, chat: ChatApi) -> None:
    """Where the next turn stops to be what was generated, gateway and index name the same block."""
    prompt = a_prompt(SHORT_WORDS)
    first = await chat.ask(prompt, 3 * BLOCK_TOKENS, is_stream=False).read()
    middle = len(first.text) // 2
    changed = f"{first.text[:middle]} and something else {first.text[middle:]}"
    messages = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": changed},
        {"role": "user", "content": "go on"},
    ]
    receipt = (await chat.ask("", ANSWER_TOKENS, is_stream=False, messages=messages).read()).receipt
    told = await explain(cluster, receipt["request_id"])
    assert told.hit_blocks == receipt["matched_tokens"] // BLOCK_TOKENS
    assert told.reason == kvindex_pb2.DIVERGED, json.dumps(receipt)
    assert told.nearest_request_id == first.receipt["request_id"]
    assert receipt["diverged_at_token"] // BLOCK_TOKENS == told.first_other_block == told.hit_blocks


async def explain(cluster: Cluster, request_id: str) -> kvindex_pb2.ExplainReply:
    [line] = cluster.lines("kvindex", event="kvindex.listening")[-1:]
    async with connect(line["address"]) as channel:
        stub = kvindex_pb2_grpc.KvIndexStub(channel)
        return await call(stub.Explain, kvindex_pb2.ExplainRequest(request_id=request_id), timeout_s=5)
