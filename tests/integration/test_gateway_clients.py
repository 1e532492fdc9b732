"""Clients that leave, read slowly or wait long; and the gateway's own end. Over real NATS, gRPC and HTTP."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from shoal_contracts.errors import Refused
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway import metrics
from shoal_gateway.service import GatewayService
from shoal_gateway.settings import GatewaySettings
from shoal_runtime.process import running
from shoal_testkit.chats import ChatClient, ChatPeers, Told, chat_client, chat_peers, peers_running
from shoal_testkit.fakes import FIRST_ANSWER_TOKEN
from shoal_testkit.servers import NatsRunning
from shoal_testkit.waits import until

CANCEL_S = 0.25


@dataclass
class System:
    """A gateway with its peers and a client."""

    peers: ChatPeers
    client: ChatClient
    port: int
    stop: Callable[[], Awaitable[None]]


@contextlib.asynccontextmanager
async def system(nats: NatsRunning, **settings: object) -> AsyncIterator[System]:
    chosen = GatewaySettings.model_validate({"nats_url": nats.url, "port": 0, "drain_s": 2, **settings})
    service, peers = GatewayService(chosen), chat_peers()
    peers.decode.answer_tokens = 1000
    peers.decode.step_s = 0.02
    async with contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(contextlib.AsyncExitStack())
        await gateway.enter_async_context(running(service, chosen))
        client = await stack.enter_async_context(chat_client(f"http://127.0.0.1:{service.port}", peers.model))
        await stack.enter_async_context(peers_running(peers, nats.url))
        await client.until_known()
        yield System(peers, client, service.port, gateway.aclose)


async def test_client_that_leaves_mid_stream_cancels_decode_once(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        told = Told()
        asking = asyncio.create_task(shoal.client.ask(told, stream=True))
        await until(lambda: len(told.tokens) > 3)
        asking.cancel()
        await until(lambda: len(shoal.peers.decode.cancels) == 1, CANCEL_S)
        await until(lambda: len(shoal.peers.tokenizer.drops) == 1, CANCEL_S)
        await asyncio.sleep(0.2)
        assert len(shoal.peers.decode.cancels) == 1
        assert len(shoal.peers.tokenizer.drops) == 1
        await until(lambda: len(shoal.peers.index.settles) == 1)


async def test_client_that_leaves_a_whole_answer_cancels_decode_once(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        asking = asyncio.create_task(shoal.client.ask())
        await until(lambda: len(shoal.peers.decode.placements) == 1)
        await asyncio.sleep(0.1)
        asking.cancel()
        await until(lambda: len(shoal.peers.decode.cancels) == 1, CANCEL_S)
        await asyncio.sleep(0.2)
        assert len(shoal.peers.decode.cancels) == 1


async def test_client_that_leaves_during_prefill_cancels_the_job_once(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        shoal.peers.prefill.delay_s = 1.5
        asking = asyncio.create_task(shoal.client.ask(stream=True))
        await until(lambda: len(shoal.peers.prefill.jobs) == 1)
        asking.cancel()
        await until(lambda: len(shoal.peers.prefill.cancels) == 1, CANCEL_S)
        queued = asyncio.create_task(shoal.client.ask())
        await asyncio.sleep(0.2)
        queued.cancel()
        await until(lambda: len(shoal.peers.prefill.cancels) == 2, CANCEL_S)
        await asyncio.sleep(2)
        assert len(shoal.peers.prefill.cancels) == 2
        assert len(shoal.peers.prefill.jobs) == 1, "a job that was still queued is taken out"
        assert shoal.peers.decode.placements == []


async def test_head_waits_for_the_first_event_or_its_time(nats: NatsRunning) -> None:
    async with system(nats, head_wait_s=0.2, keep_alive_s=0.1) as shoal:
        shoal.peers.prefill.delay_s = 1.5
        shoal.peers.decode.answer_tokens = 3
        told = Told()
        asking = asyncio.create_task(shoal.client.ask(told, stream=True))
        await until(lambda: told.status == 200, 1.2)
        await asking
        assert told.comments >= 3
        assert told.tokens == [FIRST_ANSWER_TOKEN + i for i in range(3)]
        assert told.has_done


async def test_error_before_the_head_has_its_status_and_after_it_is_an_event(nats: NatsRunning) -> None:
    async with system(nats, head_wait_s=0.3, place_wait_s=0.1) as shoal:
        shoal.peers.decode.refusal = Refused(pb.OVERLOADED, "full")
        before = await shoal.client.ask(stream=True)
        shoal.peers.prefill.delay_s = 0.5
        after = await shoal.client.ask(stream=True)
    assert before.status == 503
    assert before.body["error"]["type"] == "overloaded_error"
    assert after.status == 200
    assert after.has_done
    assert "full" in json.dumps(after.events[-1]["error"])


async def test_slow_client_is_aborted_alone(nats: NatsRunning) -> None:
    async with system(nats, max_pending_bytes=4096) as shoal:
        shoal.peers.decode.step_s = 0
        body = json.dumps(shoal.client.body(stream=True, padding="x" * 20_000)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", shoal.port, limit=1024)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: len(shoal.peers.decode.placements) == 1)
        await until(lambda: len(shoal.peers.tokenizer.drops) == 1)
        shoal.peers.decode.answer_tokens = 5
        other = await shoal.client.ask()
        assert len(other.tokens) == 5
        writer.transport.abort()


async def test_running_answers_end_before_the_gateway_does(nats: NatsRunning) -> None:
    async with system(nats, drain_s=10) as shoal:
        shoal.peers.decode.answer_tokens = 40
        told = Told()
        asking = asyncio.create_task(shoal.client.ask(told, stream=True))
        await until(lambda: len(told.tokens) > 3)
        await shoal.stop()
        await asking
    assert len(told.tokens) == 40
    assert told.has_done


async def test_answers_that_take_too_long_for_the_drain_are_cancelled_and_told_so(nats: NatsRunning) -> None:
    before = metrics.CATALOGUE.value("requests_total", outcome="cancelled")
    async with system(nats, drain_s=1) as shoal:
        told = Told()
        asking = asyncio.create_task(shoal.client.ask(told, stream=True))
        whole = asyncio.create_task(shoal.client.ask())
        await until(lambda: len(told.tokens) > 3)
        await shoal.stop()
        decode = shoal.peers.decode
        await asking
        assert (await whole).status == 503
    assert len(told.tokens) < 1000
    assert told.has_done and told.events[-1]["error"]["code"] == "draining"
    assert len(decode.cancels) == 2
    assert metrics.CATALOGUE.value("requests_total", outcome="cancelled") == before + 2


async def test_spent_budget_ends_the_stream_with_an_error_event(nats: NatsRunning) -> None:
    async with system(nats, request_budget_s=0.5) as shoal:
        told = await shoal.client.ask(stream=True)
        whole = await shoal.client.ask()
        await until(lambda: len(shoal.peers.decode.cancels) == 2)
    assert told.has_done
    assert "error" in told.end
    assert whole.status == 504
