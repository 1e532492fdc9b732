"""What a gateway does when a peer of it fails, over real NATS, gRPC and HTTP (DESIGN section 6)."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from shoal_contracts.errors import Refused, Unavailable
from shoal_contracts.ids import unpack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import prefill_pb2
from shoal_gateway import metrics
from shoal_gateway.service import GatewayService
from shoal_gateway.settings import GatewaySettings
from shoal_runtime.process import running
from shoal_testkit.chats import PROMPT, ChatClient, ChatPeers, Told, chat_client, chat_peers, peers_running
from shoal_testkit.fake_workers import FakeDecode
from shoal_testkit.fakes import FIRST_ANSWER_TOKEN, FakeTokenizer, peer_running
from shoal_testkit.servers import NatsRunning, nats_running
from shoal_testkit.waits import until

LONG_ANSWER = 60
ANSWER = list(range(FIRST_ANSWER_TOKEN, FIRST_ANSWER_TOKEN + LONG_ANSWER))


@dataclass
class System:
    """A gateway with its peers and a client."""

    peers: ChatPeers
    client: ChatClient


@contextlib.asynccontextmanager
async def system(nats: NatsRunning, **settings: object) -> AsyncIterator[System]:
    chosen = GatewaySettings.model_validate({"nats_url": nats.url, "port": 0, "drain_s": 2, **settings})
    service, peers = GatewayService(chosen), chat_peers()
    peers.decode.answer_tokens = LONG_ANSWER
    async with running(service, chosen):
        url = f"http://127.0.0.1:{service.port}"
        async with peers_running(peers, nats.url), chat_client(url, peers.model) as client:
            await client.until_known()
            yield System(peers, client)


def receipt_of(told: Told) -> dict[str, Any]:
    return told.end["receipt"] if told.events else json.loads(told.headers["x-shoal-receipt"])


async def test_lost_decode_worker_is_resumed_without_a_lost_or_repeated_token(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        first = shoal.peers.decode
        first.step_s = 0.01
        second = FakeDecode(first.pool, shoal.peers.model, answer_tokens=LONG_ANSWER)
        told = Told()
        asking = asyncio.create_task(shoal.client.ask(told, stream=True, receipt=True))
        await until(lambda: len(told.tokens) > 5)
        async with peer_running(second, nats.url):
            await first.lose()
            await asking
    assert told.tokens == ANSWER
    assert told.has_done
    assert receipt_of(told)["fallbacks"].count("decode_resumed") == 1
    [resumed] = second.placements
    sent = list(unpack_u32(resumed.resumed_token_ids))
    assert 5 < len(sent) < LONG_ANSWER
    assert sent == ANSWER[: len(sent)]
    assert len(first.placements) == 1


async def test_worker_that_fails_a_request_is_resumed_elsewhere_but_not_for_ever(nats: NatsRunning) -> None:
    async with system(nats, place_attempts=2, place_wait_s=0.5) as shoal:
        shoal.peers.decode.step_s = 0.01
        told = Told()
        asking = asyncio.create_task(shoal.client.ask(told, stream=True))
        await until(lambda: len(told.tokens) > 2)
        await shoal.peers.decode.lose()
        await asking
    assert told.status == 200
    assert "error" in told.end, "after the head an error is the last event"
    assert told.has_done
    assert told.tokens == ANSWER[: len(told.tokens)]


async def test_only_the_end_of_a_full_answer_was_lost(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        shoal.peers.decode.silent_after = 8
        shoal.peers.decode.answer_tokens = 9
        told = Told()
        asking = asyncio.create_task(shoal.client.ask(told, stream=True, max_tokens=9))
        await until(lambda: len(told.tokens) == 8)
        other = FakeDecode(shoal.peers.decode.pool, shoal.peers.model, answer_tokens=9)
        async with peer_running(other, nats.url):
            await shoal.peers.decode.lose()
            await asking
    assert told.tokens == ANSWER[:9]
    assert told.end["finish"] == "LENGTH"


async def test_lost_tokenizer_is_resumed_without_a_lost_or_repeated_event(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        shoal.peers.decode.step_s = 0.01
        first = shoal.peers.tokenizer
        second = FakeTokenizer(first.pool, shoal.peers.model)
        streaming, whole = Told(), Told()
        asking = asyncio.gather(
            shoal.client.ask(streaming, stream=True, receipt=True), shoal.client.ask(whole, receipt=True)
        )
        await until(lambda: len(streaming.tokens) > 5)
        async with peer_running(second, nats.url):
            await first.lose()
            await asking
    assert streaming.tokens == whole.tokens == ANSWER
    assert [event for event in streaming.events if "role" in event] == [{"role": "assistant"}]
    assert receipt_of(streaming)["fallbacks"] == ["tokenizer_resumed"]
    assert receipt_of(whole)["fallbacks"] == ["tokenizer_resumed"]
    openings = {bool(opening.is_resumed): opening for opening in second.openings}
    assert len(openings[True].prior_token_ids) > 0
    assert len(openings[False].prior_token_ids) == 0
    assert shoal.peers.decode.cancels == []


async def test_no_tokenizer_left_ends_the_stream_with_an_error_event(nats: NatsRunning) -> None:
    async with system(nats, event_wait_s=0.3) as shoal:
        shoal.peers.decode.step_s = 0.02
        told = Told()
        asking = asyncio.create_task(shoal.client.ask(told, stream=True))
        await until(lambda: len(told.tokens) > 5)
        await shoal.peers.tokenizer.lose()
        await asking
        await until(lambda: len(shoal.peers.decode.cancels) == 1)
    assert told.has_done
    assert told.events[-1]["error"]["type"] == "server_error"


async def test_request_goes_on_without_the_index(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        shoal.peers.index.error = Unavailable(pb.UNAVAILABLE, "not loaded")
        failing = await shoal.client.ask(receipt=True)
        shoal.peers.index.error = None
        shoal.peers.index.delay_s = 3
        silent = await shoal.client.ask(receipt=True)
        await shoal.peers.index.lose()
        gone = await shoal.client.ask(receipt=True)
    for told in (failing, silent, gone):
        assert told.tokens == ANSWER
        assert receipt_of(told)["fallbacks"] == ["index_unknown"]
        assert "matched_tokens" not in receipt_of(told)
    assert len(shoal.peers.prefill.jobs) == 3
    assert not any(job.HasField("expected_hit_tokens") for job in shoal.peers.prefill.jobs)


async def test_failed_prefill_is_tried_again_then_left_to_decode(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        shoal.peers.prefill.failures = [Unavailable(pb.ENGINE_FAILED, "engine")]
        again = await shoal.client.ask(receipt=True)
        shoal.peers.prefill.failures = [Unavailable(pb.ENGINE_FAILED, "engine")] * 2
        local = await shoal.client.ask(receipt=True)
    assert again.tokens == local.tokens == ANSWER
    assert receipt_of(again)["fallbacks"] == ["prefill_repeated"]
    assert receipt_of(again)["prefill"]["attempts"] == 2
    assert receipt_of(local)["fallbacks"] == ["prefill_repeated", "prefill_failed"]
    assert [placement.is_local_prefill for placement in shoal.peers.decode.placements] == [False, True]


async def test_missing_answer_is_tried_again_then_left_to_decode(nats: NatsRunning) -> None:
    async with system(nats, prefill_answer_s=0.3) as shoal:
        shoal.peers.prefill.is_silent = True
        told = await shoal.client.ask(receipt=True)
        [request_id] = {job.request_id for job in shoal.peers.prefill.jobs}
        await until(lambda: shoal.peers.prefill.cancels == [request_id])
    assert told.tokens == ANSWER
    assert receipt_of(told)["fallbacks"] == ["prefill_repeated", "prefill_failed"]
    assert len(shoal.peers.prefill.jobs) == 2


async def test_store_that_was_not_seen_is_a_fallback(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        shoal.peers.prefill.stored = prefill_pb2.STORED_UNKNOWN
        told = await shoal.client.ask(receipt=True)
    assert told.tokens == ANSWER
    assert receipt_of(told)["fallbacks"] == ["store_unknown"]


async def test_without_a_prefill_worker_decode_computes(nats: NatsRunning) -> None:
    before = metrics.CATALOGUE.value("fallbacks_total", fallback="no_prefill_worker")
    async with system(nats) as shoal:
        shoal.peers.prefill.process.is_draining = True
        shoal.peers.prefill.process.health.set("process", "draining")
        await asyncio.sleep(0.2)
        told = await shoal.client.ask(receipt=True)
    assert told.tokens == ANSWER
    assert receipt_of(told)["fallbacks"] == ["no_prefill_worker"]
    assert shoal.peers.decode.placements[0].is_local_prefill
    assert metrics.CATALOGUE.value("fallbacks_total", fallback="no_prefill_worker") == before + 1


async def test_nats_down_leaves_running_streams_alone_and_new_requests_to_decode() -> None:
    async with nats_running() as nats, system(nats) as shoal:
        shoal.peers.decode.step_s = 0.02
        told = Told()
        asking = asyncio.create_task(shoal.client.ask(told, stream=True, receipt=True))
        await until(lambda: len(told.tokens) > 3)
        nats.kill()
        await asyncio.sleep(0.1)
        new = await shoal.client.ask(receipt=True)
        await asking
        await nats.start()
        await until(lambda: shoal.peers.decode.nats.is_connected and shoal.peers.prefill.nats.is_connected)
        await asyncio.sleep(1.5)
        shoal.peers.decode.placements.clear()
        after = await shoal.client.ask(receipt=True)
    assert told.tokens == new.tokens == after.tokens == ANSWER
    assert receipt_of(told)["fallbacks"] == []
    assert receipt_of(new)["fallbacks"] == ["nats_away"]
    assert receipt_of(after)["fallbacks"] == []


async def test_job_that_a_restarted_nats_forgot_is_published_again() -> None:
    async with nats_running() as nats, system(nats) as shoal:
        shoal.peers.prefill.delay_s = 0.3
        busy = asyncio.create_task(shoal.client.ask())
        await until(lambda: len(shoal.peers.prefill.jobs) == 1)
        queued = asyncio.create_task(shoal.client.ask(receipt=True, prompt=PROMPT + "another"))
        await asyncio.sleep(0.1)
        nats.kill()
        await asyncio.sleep(0.3)
        await nats.start()
        told = await queued
        await busy
    assert told.tokens == ANSWER
    assert receipt_of(told)["fallbacks"] == []
    assert receipt_of(told)["prefill"]["attempts"] == 1


async def test_restarted_decode_worker_is_taken_again(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        assert (await shoal.client.ask()).tokens == ANSWER
        old = shoal.peers.decode
        instance_id = old.process.instance_id
        old.refusal = Refused(pb.DRAINING, "leaving")
        async with peer_running(
            FakeDecode(old.pool, shoal.peers.model, answer_tokens=LONG_ANSWER), nats.url, instance_id=instance_id
        ) as again:
            await old.lose()
            await asyncio.sleep(1.2)  # a beat, now as ready
            assert (await shoal.client.ask()).tokens == ANSWER
            assert len(again.placements) == 1
