"""2,000 streams at once on one gateway process: every one whole, in bounded memory."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from shoal_testkit.cluster import MODEL, Cluster, Shape, cluster_running
from shoal_testkit.grammars import check_stream
from shoal_testkit.plain_client import CHAT_PATH, read_chat

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

STREAMS = 2000
TOKENS = 60  # a second each: all are there before the first ends
READ_S = 240.0
MOST_MIB = 1024
SETTINGS = {
    "decode": {
        "SHOAL_SCRIPTED_STEP_MS": "1000",
        "SHOAL_DECODE_MAX_RUNNING_REQUESTS": str(STREAMS),
        "SHOAL_ENGINE_MAX_RUNNING_REQUESTS": str(STREAMS),
        "SHOAL_ENGINE_MAX_STEP_TOKENS": str(2 * STREAMS),
    },
    "gateway": {
        "SHOAL_GATEWAY_MAX_RUNNING_REQUESTS": str(STREAMS + 8),
        "SHOAL_GATEWAY_MAX_WAITING_REQUESTS": str(STREAMS),
        "SHOAL_GATEWAY_ADMISSION_WAIT_S": "60",
        "SHOAL_GATEWAY_ACCEPT_S": "30",
        "SHOAL_GATEWAY_ENCODE_S": "60",
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_cluster() -> AsyncIterator[Cluster]:
    async with cluster_running(Shape(), SETTINGS) as cluster:
        yield cluster


def _body(number: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"wave {number}"}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_two_thousand_streams_at_once(cluster: Cluster) -> None:
    most_running = 0.0

    async def watch() -> None:
        nonlocal most_running
        while True:
            most_running = max(most_running, await cluster.metric("gateway", "shoal_gateway_running_requests"))
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch(), name="watch")
    async with asyncio.timeout(READ_S):
        answers = await asyncio.gather(*(read_chat(cluster.url, _body(number)) for number in range(STREAMS)))
    watching.cancel()
    usages = [check_stream(CHAT_PATH, answer)["usage"] for answer in answers]
    assert {usage["completion_tokens"] for usage in usages} == {TOKENS}
    status = Path(f"/proc/{cluster.running['gateway'].process.pid}/status").read_text()
    peak_mib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) / 1024
    print(f"{most_running:.0f} at once, the gateway's peak {peak_mib:.0f} MiB")
    assert most_running > STREAMS * 0.9
    assert peak_mib < MOST_MIB
    await cluster.is_idle()
