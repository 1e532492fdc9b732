"""Chats through a gateway over real NATS, gRPC and HTTP: what clients and peers see when nothing breaks."""

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from shoal_contracts.errors import BadRequest, Refused
from shoal_contracts.ids import unpack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.service import GatewayService
from shoal_gateway.settings import GatewaySettings
from shoal_runtime.presence import Load
from shoal_runtime.process import running
from shoal_testkit.chats import PROMPT, ChatClient, ChatPeers, chat_client, chat_peers, peers_running
from shoal_testkit.fake_workers import FakeDecode
from shoal_testkit.fakes import ANSWER_TOKENS, BLOCK_TOKENS, CONTEXT_TOKENS, FIRST_ANSWER_TOKEN, peer_running
from shoal_testkit.servers import NatsRunning
from shoal_testkit.waits import until

ANSWER = list(range(FIRST_ANSWER_TOKEN, FIRST_ANSWER_TOKEN + ANSWER_TOKENS))


@dataclass
class System:
    """A gateway with its peers and a client."""

    peers: ChatPeers
    client: ChatClient
    url: str


@contextlib.asynccontextmanager
async def system(nats: NatsRunning, **settings: object) -> AsyncIterator[System]:
    chosen = GatewaySettings.model_validate({"nats_url": nats.url, "port": 0, "drain_s": 2, **settings})
    service, peers = GatewayService(chosen), chat_peers()
    async with running(service, chosen):
        url = f"http://127.0.0.1:{service.port}"
        async with peers_running(peers, nats.url), chat_client(url, peers.model) as client:
            await client.until_known()
            yield System(peers, client, url)


async def test_streaming_chat_goes_through_every_stage(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        told = await shoal.client.ask(stream=True, receipt=True)
        peers = shoal.peers
        await until(lambda: len(peers.index.settles) == 1)
    assert told.status == 200
    assert told.tokens == ANSWER
    assert told.has_done
    assert told.events[0] == {"role": "assistant"}
    assert told.headers["x-accel-buffering"] == "no"
    assert told.headers["cache-control"] == "no-cache"
    [job], [placement] = peers.prefill.jobs, peers.decode.placements
    receipt = told.end["receipt"]
    assert job.request_id == placement.request_id == receipt["request_id"] == told.headers["x-request-id"]
    assert not placement.is_local_prefill
    assert receipt["outcome"] == "finished"
    assert receipt["fallbacks"] == []
    assert receipt["prefill"]["stored"] == "yes"
    assert receipt["completion_tokens"] == ANSWER_TOKENS
    assert receipt["hit_tokens"] + receipt["miss_tokens"] == receipt["prompt_tokens"] == len(PROMPT)
    assert len(peers.index.settles[0].block_hashes) // 32 == (len(PROMPT) + ANSWER_TOKENS) // BLOCK_TOKENS


async def test_whole_answer_comes_as_one_body_with_its_receipt_in_a_header(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        shoal.peers.prefill.hit_tokens = BLOCK_TOKENS
        told = await shoal.client.ask(receipt=True)
        without = await shoal.client.ask()
    assert told.status == 200
    assert told.tokens == ANSWER
    assert told.end["cached_tokens"] == BLOCK_TOKENS
    assert json.loads(told.headers["x-shoal-receipt"])["outcome"] == "finished"
    assert "x-shoal-receipt" not in without.headers
    assert told.headers["x-request-id"] != without.headers["x-request-id"]


async def test_prefill_is_skipped_when_less_than_a_block_misses(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        shoal.peers.index.hit_blocks = len(PROMPT) // BLOCK_TOKENS
        told = await shoal.client.ask(receipt=True)
        short = await shoal.client.ask(prompt="short")
    receipt = json.loads(told.headers["x-shoal-receipt"])
    assert shoal.peers.prefill.jobs == []
    assert receipt["fallbacks"] == []
    assert receipt["matched_tokens"] == receipt["hit_tokens"] == len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
    assert told.end["cached_tokens"] == receipt["decode"]["hit_tokens"]
    assert short.tokens == ANSWER
    assert not any(placement.is_local_prefill for placement in shoal.peers.decode.placements)


async def test_stop_string_cancels_decode_once_and_hides_what_came_after(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        shoal.peers.decode.step_s = 0.02
        shoal.peers.decode.answer_tokens = 100
        told = await shoal.client.ask(stream=True, stop_token=ANSWER[2])
        await until(lambda: len(shoal.peers.decode.cancels) == 1)
    assert told.tokens == ANSWER[:2]
    assert told.end["finish"] == "STOP"
    assert told.end["completion_tokens"] == 2


async def test_logprobs_reach_the_tokenizer(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        told = await shoal.client.ask(top_logprobs=0)
    assert told.tokens == ANSWER


async def test_next_turn_names_the_first_token_that_differs(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        await shoal.client.ask()
        same = await shoal.client.ask(receipt=True, prompt=PROMPT + "".join(map(chr, ANSWER)) + "next question")
        other = await shoal.client.ask(receipt=True, prompt=PROMPT + "".join(map(chr, ANSWER[:3])) + "another ending")
    assert "diverged_at_token" not in json.loads(same.headers["x-shoal-receipt"])
    assert json.loads(other.headers["x-shoal-receipt"])["diverged_at_token"] == len(PROMPT) + 3


async def test_many_chats_at_once_keep_their_tokens_apart(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        shoal.peers.decode.step_s = 0.001
        shoal.peers.decode.answer_tokens = 50
        told = await asyncio.gather(*(shoal.client.ask(stream=bool(i % 2)) for i in range(64)))
    assert all(one.tokens == list(range(ANSWER[0], ANSWER[0] + 50)) for one in told)


async def test_request_goes_to_the_worker_with_room(nats: NatsRunning) -> None:
    async with system(nats, accept_s=0.3) as shoal:
        shoal.peers.decode.refusal = Refused(pb.OVERLOADED, "full")
        other = FakeDecode(shoal.peers.decode.pool, shoal.peers.model)
        async with peer_running(other, nats.url):
            told = await shoal.client.ask(receipt=True)
            shoal.peers.decode.refusal = None
            shoal.peers.decode.is_mute = True
            again = [await shoal.client.ask(receipt=True) for _ in range(3)]
    assert [one.tokens for one in (told, *again)] == [ANSWER] * 4
    assert len(other.placements) >= 4


async def test_own_placements_count_between_two_load_reports(nats: NatsRunning) -> None:
    async with system(nats, place_wait_s=0.1) as shoal:
        shoal.peers.decode.told_load = Load(0, 1, 0, 0, 0)
        shoal.peers.decode.process.health.set("test", "tell the load now")
        shoal.peers.decode.process.health.set("test", None)
        await asyncio.sleep(0.2)
        one_by_one = [(await shoal.client.ask()).status for _ in range(4)]
        shoal.peers.decode.step_s = 0.1
        both = [told.status for told in await asyncio.gather(shoal.client.ask(), shoal.client.ask())]
    assert one_by_one == [200] * 4
    assert sorted(both) == [200, 503]
    assert len(shoal.peers.decode.placements) == 5


async def test_waits_for_room_and_is_refused_in_the_end(nats: NatsRunning) -> None:
    async with system(nats, place_wait_s=0.5) as shoal:
        shoal.peers.decode.refusal = Refused(pb.OVERLOADED, "full")
        waiting = asyncio.create_task(shoal.client.ask())
        await until(lambda: len(shoal.peers.decode.placements) >= 1)
        shoal.peers.decode.refusal = None
        admitted = await waiting
        shoal.peers.decode.refusal = Refused(pb.OVERLOADED, "full")
        refused = await shoal.client.ask()
    assert admitted.tokens == ANSWER
    assert refused.status == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.body["error"]["type"] == "overloaded_error"


async def test_admission_is_bounded(nats: NatsRunning) -> None:
    async with system(nats, max_running_requests=1, max_waiting_requests=1) as shoal:
        shoal.peers.decode.step_s = 0.1
        first = asyncio.create_task(shoal.client.ask())
        await until(lambda: len(shoal.peers.decode.placements) == 1)
        second = asyncio.create_task(shoal.client.ask())
        await asyncio.sleep(0.05)
        third = await shoal.client.ask()
        assert (await first).tokens == (await second).tokens == ANSWER
    assert third.status == 503
    assert "retry-after" in third.headers


async def test_bad_requests_are_told_in_openais_shape(nats: NatsRunning) -> None:
    async with system(nats, max_body_bytes=20_000) as shoal:
        http, error_of = shoal.client.http, lambda response: response.json()["error"]
        not_json = await http.post("/v1/chat/completions", content=b"{")
        unknown = await http.post("/v1/chat/completions", json={**shoal.client.body(), "model": "nobody"})
        too_large = await http.post("/v1/chat/completions", content=b"x" * 20_001)
        grows = await http.post("/v1/chat/completions", content=_pieces(30_000))
        too_long = await shoal.client.ask(prompt="x" * (CONTEXT_TOKENS + 5))
        too_much = await shoal.client.ask(max_tokens=CONTEXT_TOKENS)
        no_path = await http.get("/v1/nothing")
        no_method = await http.get("/v1/chat/completions")
        shoal.peers.tokenizer.encode_error = BadRequest(pb.INVALID_REQUEST, "wrong", param="messages[0].role")
        wrong = await shoal.client.ask(stream=True)
    assert (not_json.status_code, unknown.status_code, too_large.status_code) == (400, 404, 413)
    assert grows.status_code == 413
    assert error_of(unknown)["code"] == "model_not_found"
    assert too_long.status == 400
    assert too_long.body["error"]["code"] == "context_length_exceeded"
    assert str(CONTEXT_TOKENS) in too_long.body["error"]["message"]
    assert str(CONTEXT_TOKENS + 5) in too_long.body["error"]["message"]
    assert too_much.status == 400
    assert too_much.body["error"]["param"] == "max_tokens"
    assert (no_path.status_code, no_method.status_code) == (404, 405)
    assert error_of(no_path)["type"] == error_of(no_method)["type"] == "invalid_request_error"
    assert no_method.headers["allow"] == "POST"
    assert wrong.status == 400
    assert wrong.body["error"]["param"] == "messages[0].role"
    assert all(response.headers["x-request-id"] for response in (not_json, unknown, too_large, no_path, no_method))
    assert shoal.peers.decode.placements == []


async def _pieces(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 1000):
        yield b"x" * 1000


async def test_models_are_those_that_decode_serves(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        http, name = shoal.client.http, shoal.peers.model
        listed = (await http.get("/v1/models")).json()
        one = (await http.get(f"/v1/models/{name}")).json()
        missing = await http.get("/v1/models/owner/nobody")
    assert name in [model["id"] for model in listed["data"]]
    assert one["object"] == "model"
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_readiness_is_a_real_request_and_names_the_stage_that_fails(nats: NatsRunning) -> None:
    async with system(nats, probe_keep_s=0, prefill_answer_s=0.5, prefill_attempts=1) as shoal:
        http, peers = shoal.client.http, shoal.peers
        ready = await http.get("/readyz")
        stages = {}
        peers.index.error = Refused(pb.OVERLOADED, "no")
        stages["kvindex"] = (await http.get("/readyz")).json()
        peers.index.error = None
        peers.prefill.is_silent = True
        stages["prefill"] = (await http.get("/readyz")).json()
        peers.prefill.is_silent = False
        peers.decode.hit_tokens = 0
        stages["store"] = (await http.get("/readyz")).json()
        peers.tokenizer.encode_error = Refused(pb.OVERLOADED, "no")
        stages["tokenizer"] = (await http.get("/readyz")).json()
        alive = await http.get("/healthz")
    assert ready.status_code == 200, ready.text
    assert ready.json()["is_ready"]
    assert {stage: report["stage"] for stage, report in stages.items()} == {stage: stage for stage in stages}
    assert alive.status_code == 200
    first, second = peers.prefill.jobs[0], peers.prefill.jobs[1]
    block = 4 * BLOCK_TOKENS
    assert first.token_ids[:block] == second.token_ids[:block]
    assert first.token_ids != second.token_ids
    assert len(first.token_ids) >= 2 * block
    assert first.traffic_class == pb.PROBE


async def test_readiness_is_kept_and_shared(nats: NatsRunning) -> None:
    async with system(nats, probe_keep_s=60) as shoal:
        reports = await asyncio.gather(*(shoal.client.http.get("/readyz") for _ in range(10)))
    assert {report.status_code for report in reports} == {200}
    assert len(shoal.peers.decode.placements) == 1


async def test_metrics_count_the_request(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        await shoal.client.ask()
        text = (await shoal.client.http.get("/metrics")).text
    assert 'shoal_gateway_requests_total{outcome="finished"}' in text
    assert "shoal_gateway_ttft_seconds_count" in text


@pytest.mark.logs_error("process.failed")
async def test_port_in_use_is_a_clear_error(nats: NatsRunning) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = GatewaySettings.model_validate({"nats_url": nats.url, "port": port})
        with pytest.raises(Exception, match=f"cannot listen on 127.0.0.1:{port}.*SHOAL_GATEWAY_PORT"):
            async with running(GatewayService(settings), settings):
                pass


async def test_connections_do_not_wait_for_more_to_send(nats: NatsRunning) -> None:
    """TCP_NODELAY: single tokens arrive one by one, about when they are made."""
    async with system(nats) as shoal:
        shoal.peers.decode.step_s = 0.05
        arrivals: list[float] = []
        body = shoal.client.body(stream=True)
        async with shoal.client.http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if '"token"' in line:
                    arrivals.append(asyncio.get_running_loop().time())
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert len(arrivals) == ANSWER_TOKENS
    assert max(gaps) < 0.2
    assert min(gaps) > 0.01


async def test_openai_error_class_for_unreachable_peers(nats: NatsRunning) -> None:
    settings = GatewaySettings.model_validate({"nats_url": nats.url, "port": 0, "drain_s": 2})
    service = GatewayService(settings)
    async with (
        running(service, settings),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{service.port}", trust_env=False) as http,
    ):
        body = {"model": "m", "messages": []}
        response = await http.post("/v1/chat/completions", json=body)
        ready = await http.get("/readyz")
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"
    assert ready.status_code == 503


async def test_tokens_are_passed_as_they_are(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        await shoal.client.ask(prompt="grüße 🐟")
    [placement] = shoal.peers.decode.placements
    assert list(unpack_u32(placement.token_ids)) == [ord(letter) for letter in "grüße 🐟"]
