"""Two chats that share a prefix, through a gateway with fakes around it: who computes, who waits, and for how long."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from shoal_contracts.errors import Unavailable
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway import metrics
from shoal_gateway.service import GatewayService
from shoal_gateway.settings import GatewaySettings
from shoal_kvblocks import block_hashes
from shoal_runtime.process import running
from shoal_testkit.chats import PROMPT, ChatClient, ChatPeers, Told, chat_client, chat_peers, peers_running
from shoal_testkit.fakes import BLOCK_TOKENS
from shoal_testkit.servers import NatsRunning
from shoal_testkit.waits import until

HASHES = block_hashes(pack_u32(map(ord, PROMPT)), BLOCK_TOKENS)
WHOLE_TOKENS = len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
LONG_BLOCKS = 250
LONG = "y" * (LONG_BLOCKS * BLOCK_TOKENS + 3)  # two seconds at the speed that is assumed


@dataclass
class System:
    """A gateway with its peers and a client."""

    peers: ChatPeers
    client: ChatClient

    def ask(self, **fields: Any) -> "asyncio.Task[Told]":
        return asyncio.create_task(self.client.ask(receipt=True, **fields))


@contextlib.asynccontextmanager
async def system(nats: NatsRunning, **settings: object) -> AsyncIterator[System]:
    chosen = GatewaySettings.model_validate({"nats_url": nats.url, "port": 0, "drain_s": 2, **settings})
    service, peers = GatewayService(chosen), chat_peers()
    peers.index.is_sharing = True
    async with running(service, chosen):
        url = f"http://127.0.0.1:{service.port}"
        async with peers_running(peers, nats.url), chat_client(url, peers.model) as client:
            await client.until_known()
            yield System(peers, client)


def receipt_of(told: Told) -> dict[str, Any]:
    receipt: dict[str, Any] = json.loads(told.headers["x-shoal-receipt"])
    return receipt


async def test_second_chat_waits_for_the_first_ones_blocks_and_computes_nothing(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        shoal.peers.prefill.delay_s = 1.5
        waits = metrics.CATALOGUE.value("shared_waits_total", outcome="stored")
        first = shoal.ask(prompt=LONG)
        await until(lambda: len(shoal.peers.prefill.jobs) == 1)
        second = shoal.ask(prompt=LONG)
        await until(lambda: len(shoal.peers.index.matches) == 2)
        await asyncio.sleep(0.1)
        shoal.peers.index.store(block_hashes(pack_u32(map(ord, LONG)), BLOCK_TOKENS))
        receipts = [receipt_of(await asking) for asking in (first, second)]
        assert len(shoal.peers.prefill.jobs) == 1
    assert "shared" not in receipts[0]
    shared = receipts[1]["shared"]
    assert (shared["request_id"], shared["outcome"]) == (receipts[0]["request_id"], "stored")
    assert 50 < shared["waited_ms"] < 1500
    assert receipts[1]["fallbacks"] == []
    assert "prefill" not in receipts[1]
    assert receipts[1]["matched_tokens"] == LONG_BLOCKS * BLOCK_TOKENS
    assert metrics.CATALOGUE.value("shared_waits_total", outcome="stored") == waits + 1


async def test_failed_prefill_leaves_the_prefix_to_who_waits(nats: NatsRunning) -> None:
    async with system(nats, prefill_attempts=1) as shoal:
        shoal.peers.prefill.delay_s = 1.0
        shoal.peers.prefill.failures = [Unavailable(pb.ENGINE_FAILED, "broken")]
        shoal.peers.decode.step_s = 0.5  # the first chat still runs when the second one asks again
        first = shoal.ask(prompt=LONG)
        await until(lambda: len(shoal.peers.prefill.jobs) == 1)
        second = shoal.ask(prompt=LONG)
        receipts = [receipt_of(await asking) for asking in (first, second)]
    assert "prefill_failed" in receipts[0]["fallbacks"]
    assert receipts[1]["shared"]["outcome"] == "given_up"
    assert receipts[1]["prefill"]["stored"] == "yes"


async def test_claim_of_a_request_that_left_is_over_at_once(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        shoal.peers.prefill.is_silent = True
        first = shoal.ask()
        await until(lambda: len(shoal.peers.index.claims) == 1)
        first.cancel()
        await until(lambda: not shoal.peers.index.claims)
        shoal.peers.prefill.is_silent = False
        assert "shared" not in receipt_of(await shoal.client.ask(receipt=True))


async def test_claim_of_a_dead_gateway_costs_at_most_the_time_of_computing(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        shoal.peers.index.claims["of the dead"] = (float("inf"), [HASHES[:32], HASHES[32:64]])
        told = await shoal.client.ask(receipt=True)
    receipt = receipt_of(told)
    assert receipt["shared"]["request_id"] == "of the dead"
    assert receipt["shared"]["outcome"] == "time_over"
    assert receipt["shared"]["waited_ms"] < 500
    assert receipt["fallbacks"] == ["affinity_missed"]
    assert receipt["prefill"]["stored"] == "yes"


async def test_index_that_fails_during_the_wait_fails_nobody(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        shoal.peers.index.claims["other"] = (float("inf"), [HASHES[:32]])
        asking = shoal.ask()
        await until(lambda: len(shoal.peers.index.matches) == 1)
        shoal.peers.index.error = Unavailable(pb.UNAVAILABLE, "gone")
        receipt = receipt_of(await asking)
    assert receipt["shared"]["outcome"] == "index_away"
    assert receipt["matched_tokens"] == 0
    assert receipt["outcome"] == "finished"


async def test_every_match_says_how_long_the_request_may_read(nats: NatsRunning) -> None:
    async with system(nats, request_budget_s=60) as shoal:
        await shoal.client.ask()
        [request] = shoal.peers.index.matches
    assert 55_000 < request.hold_ms <= 60_000
    assert request.claim_pending_ms > 1000
