"""Reports of the stores are lost: the index says so and requests go on; after the listing it is right, to the block.

Two kvindexes, on whose maps, on Postgres, the shared folder and the stores' own listings all have to agree.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from shoal_testkit.answers import ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import WORKERS, Cluster, Shape, cluster_running
from shoal_testkit.holdings import shared_blocks, until_equal
from shoal_testkit.report_proxy import report_proxy
from shoal_testkit.scripted_store import Fate, ReportLine

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

SETTINGS = {
    "prefill": {
        "SHOAL_SCRIPTED_PREFILL_TOKENS_PER_S": "2000",
        "SHOAL_PREFILL_HANDOFF_WAIT_MS": "500",  # a report that is lost is waited for by every request
    },
}
TOKENS = 4
WORDS = 300
BLOCKS = 2
TOLD_S = 60
EQUAL_S = 90.0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_cluster() -> AsyncIterator[Cluster]:
    async with cluster_running(Shape(tokenizers=1, prefill=2, decode=1, kvindexes=2), SETTINGS) as cluster:
        yield cluster


async def ask(chat: ChatApi, count: int = 2) -> list[str]:
    """New prompts; what is not known of the store never fails a request."""
    prompts = [a_prompt(WORDS) for _ in range(count)]
    for answer in await chat.read_all(prompts, TOKENS):
        assert_whole(answer, TOKENS)
    return prompts


async def assert_found(chat: ChatApi, prompts: list[str]) -> None:
    for answer in await chat.read_all(prompts, TOKENS):
        assert answer.receipt["matched_tokens"] >= BLOCKS * 128
        assert answer.receipt["fallbacks"] == []


def workers(cluster: Cluster) -> list[str]:
    return [name for name in cluster.commands if name.split("-")[0] in WORKERS]


async def not_complete(cluster: Cluster) -> list[str]:
    """Instances that say so, and are ready all the same."""
    found = []
    async with httpx.AsyncClient(timeout=5, trust_env=False) as http:
        for name in cluster.indexes:
            reply = await http.get(f"{cluster.commands[name].url}/readyz")
            assert reply.status_code == httpx.codes.OK
            if "not complete" in reply.json()["reasons"].get("listing", ""):
                found.append(name)
    return found


async def not_complete_becomes(cluster: Cluster, names: list[str]) -> None:
    async with asyncio.timeout(TOLD_S):
        while await not_complete(cluster) != names:
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def reporting_over(cluster: Cluster, line: ReportLine) -> AsyncIterator[None]:
    """Every worker's store reports over this line; for that they start anew, with a number of a new life."""
    names = workers(cluster)
    async with report_proxy(line) as url:
        with contextlib.ExitStack() as changes:
            for name in names:
                changes.enter_context(cluster.changed(name, SHOAL_SCRIPTED_COORDINATOR_URL=url))
            cluster.kill(*names)
            try:
                await cluster.start(*names)
                await cluster.serves_well()
                yield
            finally:  # the next test starts them with their own settings
                await cluster.stop(*names)


async def test_failed_late_and_reordered_deliveries(cluster: Cluster, chat: ChatApi) -> None:
    line = ReportLine([address.coordinator_url for address in cluster.indexes.values()])
    async with reporting_over(cluster, line):
        cluster.kill("postgres")  # nobody can list: it lasts until everybody has said so
        asked = []
        for fate in (Fate.FAILS, Fate.ARRIVES_UNANSWERED, Fate.ARRIVES_LATE):
            before = line.lost_deliveries
            line.fate = fate
            asked += await ask(chat)
            assert line.lost_deliveries > before
            line.fate = Fate.ARRIVES
            asked += await ask(chat)
        await not_complete_becomes(cluster, list(cluster.indexes))
        asked += await ask(chat)
        await cluster.start("postgres")
        await until_equal(cluster, ever=list(shared_blocks(cluster)), timeout_s=EQUAL_S)
        await not_complete_becomes(cluster, [])
        await assert_found(chat, asked)


async def test_a_kvindex_is_killed_and_a_store_dies_while_they_report(cluster: Cluster, chat: ChatApi) -> None:
    running = [chat.ask(a_prompt(3 * WORDS), TOKENS) for _ in range(2)]
    await cluster.whose("prefill")
    cluster.kill("kvindex", "prefill-2")  # whose store reports to the other one
    asked = await ask(chat)
    for answer in running:
        assert_whole(await answer.read(), TOKENS)
    await cluster.start("kvindex", "prefill-2")
    await cluster.serves_well()
    asked += await ask(chat)
    await until_equal(cluster, ever=list(shared_blocks(cluster)), timeout_s=EQUAL_S)
    await assert_found(chat, asked)


async def test_a_kvindex_that_stands_still_hears_old_reports_late(cluster: Cluster, chat: ChatApi) -> None:
    cluster.freeze("kvindex-2")
    try:
        asked = await ask(chat)
        await asyncio.sleep(3)  # a store waits two seconds for its answer
        asked += await ask(chat)
    finally:
        cluster.thaw("kvindex-2")
    asked += await ask(chat)
    await until_equal(cluster, ever=list(shared_blocks(cluster)), timeout_s=EQUAL_S)
    await assert_found(chat, asked)
