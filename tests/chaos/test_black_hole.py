"""A peer that beats, accepts connections and never answers, and a client that hardly reads: nobody else is slower."""

import asyncio
import contextlib
import json
import socket
import statistics
import time
from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client

from shoal_contracts import subjects
from shoal_contracts.v1 import fleet_pb2
from shoal_gateway.silence import ASIDE_S
from shoal_testkit.answers import ChatApi, a_prompt, assert_whole
from shoal_testkit.cluster import MODEL, Cluster
from shoal_testkit.plain_client import send_chat

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(150)]

TOKENS = 10
REQUESTS = 12
HEARD_S = 5.0
BEAT_S = 0.5
HOLE = "hole"
TOLD = {  # how a receipt shows that its request met the hole; an Encode that was asked elsewhere does not show
    fleet_pb2.DECODE: "placement_refused",
    fleet_pb2.TOKENIZER: "tokenizer_resumed",
    fleet_pb2.KVINDEX: "index_unknown",
}


@contextlib.asynccontextmanager
async def black_hole(cluster: Cluster, role: fleet_pb2.Role.ValueType) -> AsyncIterator[None]:
    """An idle instance of ``role`` by its beats, which are those of a real one with another address."""
    client = Client()
    await client.connect(cluster.commands["nats"].url)
    server = socket.create_server(("127.0.0.1", 0), backlog=64)  # the kernel connects, nobody reads
    port = server.getsockname()[1]
    heard = await client.subscribe(subjects.beats(role))
    beat = fleet_pb2.Beat.FromString((await heard.next_msg(timeout=HEARD_S)).data)
    await heard.unsubscribe()
    beat.instance_id, beat.incarnation, beat.address = HOLE, 1, f"127.0.0.1:{port}"
    beat.load.running_requests = beat.load.waiting_requests = beat.load.cached_tokens = 0

    async def beats() -> None:
        while True:
            await client.publish(subjects.beat(role, HOLE), beat.SerializeToString())
            await asyncio.sleep(BEAT_S)

    task = asyncio.create_task(beats(), name="beats")
    try:
        await asyncio.sleep(2 * BEAT_S)
        yield
    finally:
        task.cancel()
        server.close()
        await client.close()


@pytest.mark.parametrize("role", TOLD, ids=fleet_pb2.Role.Name)
async def test_only_the_first_requests_find_out(
    cluster: Cluster, chat: ChatApi, role: fleet_pb2.Role.ValueType
) -> None:
    took_s, met = [], 0
    async with black_hole(cluster, role):
        for _ in range(REQUESTS):
            began_s = time.monotonic()
            answer = await chat.ask(a_prompt(150), TOKENS).read()
            assert_whole(answer, TOKENS)
            took_s.append(time.monotonic() - began_s)
            assert HOLE not in json.dumps(answer.receipt)
            met += TOLD[role] in answer.receipt["fallbacks"]
    print(f"{fleet_pb2.Role.Name(role)}: slowest {max(took_s):.2f} s, median {statistics.median(took_s):.2f} s")
    assert met <= 1 + sum(took_s) / ASIDE_S  # once a stretch somebody asks again


async def test_client_that_hardly_reads_keeps_nobody_waiting(cluster: Cluster, chat: ChatApi) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": a_prompt(40)}],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    alone = await chat.read_all([a_prompt(40)] * 2, 40)
    reader, writer = await send_chat(cluster.url, body)

    async def crawl() -> None:
        while await reader.read(1):
            await asyncio.sleep(1)

    crawling = asyncio.create_task(crawl(), name="slow_client")
    for answer in await chat.read_all([a_prompt(40) for _ in range(4)], 40):
        assert_whole(answer, 40)
        print(f"beside it {answer.receipt['total_ms']} ms, alone {alone[0].receipt['total_ms']} ms")
    assert not crawling.done()
    crawling.cancel()
    writer.close()
