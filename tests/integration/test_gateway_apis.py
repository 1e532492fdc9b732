"""The four APIs over real HTTP: each body reaches the tokenizer as what it is, each error has its API's shape."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai
import pytest

from shoal_contracts.errors import BadRequest, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import tokenizer_pb2
from shoal_gateway.service import GatewayService
from shoal_gateway.settings import GatewaySettings
from shoal_runtime.process import running
from shoal_testkit.chats import ChatPeers, chat_client, chat_peers, peers_running
from shoal_testkit.fakes import CONTEXT_TOKENS, FIRST_ANSWER_TOKEN
from shoal_testkit.servers import NatsRunning
from shoal_testkit.waits import until

CHATS = {"/v1/chat/completions": tokenizer_pb2.CHAT_COMPLETIONS, "/v1/completions": tokenizer_pb2.COMPLETIONS}
APIS = {**CHATS, "/v1/responses": tokenizer_pb2.RESPONSES, "/v1/messages": tokenizer_pb2.MESSAGES}
MESSAGES = "/v1/messages"
VERSION = {"anthropic-version": "2023-06-01"}


@dataclass
class System:
    """A gateway with its peers; no Postgres."""

    peers: ChatPeers
    http: httpx.AsyncClient
    url: str

    def body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.peers.model, "prompt": "hello", "store": False, **fields}


@contextlib.asynccontextmanager
async def system(nats: NatsRunning, **settings: Any) -> AsyncIterator[System]:
    nowhere = "postgresql://nobody@127.0.0.1:1/none"
    chosen = GatewaySettings.model_validate(
        {"nats_url": nats.url, "postgres": {"url": nowhere}, "port": 0, "drain_s": 2, **settings}
    )
    service, peers = GatewayService(chosen), chat_peers()
    async with running(service, chosen):
        url = f"http://127.0.0.1:{service.port}"
        async with peers_running(peers, nats.url), chat_client(url, peers.model) as client:
            await client.until_known()
            yield System(peers, client.http, url)


def assert_shape(path: str, response: httpx.Response, status: int) -> Any:
    """The error object of whichever shape belongs to the path."""
    assert response.status_code == status, response.text
    told, request_id = response.json(), response.headers["x-request-id"]
    if not path.startswith(MESSAGES):
        assert set(told) == {"error"} and set(told["error"]) == {"message", "type", "param", "code"}
        assert "request-id" not in response.headers
        return told["error"]
    assert response.headers["request-id"] == told["request_id"] == request_id
    assert told["type"] == "error" and set(told["error"]) == {"type", "message"}
    return told["error"]


async def test_each_api_is_named_to_the_tokenizer_and_answered(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        keys = {
            "x-api-key": "any",
            "authorization": "Bearer any",
            "anthropic-version": "what-ever",
            "anthropic-beta": "x",
        }
        plain = {path: await shoal.http.post(path, json=shoal.body(), headers=keys) for path in APIS}
        streams = {path: await shoal.http.post(path, json=shoal.body(stream=True)) for path in APIS}
    asked = shoal.peers.tokenizer.encodes
    assert [request.api for request in asked] == [*APIS.values()] * 2
    assert {response.status_code for response in (*plain.values(), *streams.values())} == {200}
    assert all(response.json()["tokens"][0] == FIRST_ANSWER_TOKEN for response in plain.values())
    assert all(response.headers["content-type"].startswith("text/event-stream") for response in streams.values())
    ids = {path: response.headers["x-request-id"] for path, response in plain.items()}
    assert list(ids.values()) == [request.request_id for request in asked[:4]]
    assert plain[MESSAGES].headers["request-id"] == ids[MESSAGES]
    assert streams[MESSAGES].headers["request-id"] == streams[MESSAGES].headers["x-request-id"]


async def test_notes_of_the_tokenizer_stand_in_the_receipt(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        body = shoal.body(notes=["effort: not known"])
        told = await shoal.http.post(MESSAGES, json=body, headers={"x-shoal-receipt": "1"})
        without = await shoal.http.post(MESSAGES, json=shoal.body(), headers={"x-shoal-receipt": "1"})
    assert json.loads(told.headers["x-shoal-receipt"])["notes"] == ["effort: not known"]
    assert "notes" not in json.loads(without.headers["x-shoal-receipt"])


async def test_errors_have_the_shape_of_the_api_that_was_called(nats: NatsRunning) -> None:
    types: dict[str, list[str]] = {}
    async with system(nats, max_body_bytes=20_000) as shoal:
        http = shoal.http
        for path in APIS:
            long = shoal.body(prompt="x" * (CONTEXT_TOKENS + 5))
            failed = [
                (await http.post(path, content=b"{"), 400),
                (await http.post(path, json=shoal.body(model="nobody")), 404),
                (await http.post(path, json=long), 400),
                (await http.post(path, content=b"x" * 20_001), 413),
                (await http.put(path), 405),
                (await http.post(f"{path}/no/such/thing"), 404),
            ]
            shoal.peers.tokenizer.encode_error = Unavailable(pb.UNAVAILABLE, "lost", retry_after_s=1)
            failed.append((await http.post(path, json=shoal.body(stream=True)), 503))
            shoal.peers.tokenizer.encode_error = None
            types[path] = [assert_shape(path, response, status)["type"] for response, status in failed]
    assert all(types[path] == [*["invalid_request_error"] * 6, "server_error"] for path in (*CHATS, "/v1/responses"))
    assert types[MESSAGES] == [
        *("invalid_request_error", "not_found_error", "invalid_request_error", "request_too_large"),
        *("invalid_request_error", "not_found_error", "api_error"),
    ]
    assert shoal.peers.decode.placements == []


@pytest.mark.parametrize("path", APIS)
async def test_failure_that_no_tokenizer_can_write_ends_the_stream_in_its_form(nats: NatsRunning, path: str) -> None:
    async with system(nats, event_attempts=1) as shoal:
        shoal.peers.decode.step_s, shoal.peers.decode.answer_tokens = 0.02, 100
        asking = asyncio.create_task(shoal.http.post(path, json=shoal.body(stream=True, max_tokens=200)))
        await until(lambda: bool(shoal.peers.decode.placements))
        await asyncio.sleep(0.2)
        await shoal.peers.tokenizer.lose()
        told = (await asking).text
        await until(lambda: len(shoal.peers.decode.cancels) == 1)
    blocks = told.strip().split("\n\n")
    if path in CHATS:
        assert blocks[-1] == "data: [DONE]"
        assert set(json.loads(blocks[-2].removeprefix("data: "))["error"]) == {"message", "type", "param", "code"}
        return
    name, data = blocks[-1].split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert (name, event["type"]) == ("event: error", "error")
    if path == MESSAGES:
        assert event["error"]["type"] == "api_error"
    else:
        assert event["sequence_number"] == len(blocks) - 1
        assert event["code"] == "unavailable"


async def test_tokens_are_counted_by_the_tokenizer(nats: NatsRunning) -> None:
    async with system(nats, max_body_bytes=20_000) as shoal:
        path = f"{MESSAGES}/count_tokens"
        counted = await shoal.http.post(path, json=shoal.body(prompt="x" * 77), headers=VERSION)
        broken = await shoal.http.post(path, content=b"{")
        large = await shoal.http.post(path, content=b"x" * 20_001)
        shoal.peers.tokenizer.encode_error = BadRequest(pb.INVALID_REQUEST, "wrong", param="messages")
        wrong = await shoal.http.post(path, json=shoal.body())
    assert counted.content == b'{"input_tokens": 77}'
    assert counted.headers["request-id"] == counted.headers["x-request-id"]
    assert_shape(path, broken, 400)
    assert assert_shape(path, large, 413)["type"] == "request_too_large"
    assert assert_shape(path, wrong, 400)["message"] == "messages: wrong"
    assert shoal.peers.decode.placements == []


async def test_models_have_the_shape_that_the_header_asks_for(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        name, get = shoal.peers.model, shoal.http.get
        ours = (await get(f"/v1/models/{name}")).json()
        theirs = (await get(f"/v1/models/{name}", headers=VERSION)).json()
        page = (await get("/v1/models", headers=VERSION)).json()
        behind = (await get("/v1/models", headers=VERSION, params={"after_id": name, "limit": "1"})).json()
        before = (await get("/v1/models", headers=VERSION, params={"before_id": name})).json()
        missing = await get("/v1/models/owner/nobody", headers=VERSION)
        wrong = await get("/v1/models", headers=VERSION, params={"limit": "0"})
    assert (ours["object"], ours["id"]) == ("model", name)
    assert (theirs["type"], theirs["id"], theirs["display_name"]) == ("model", name, name)
    assert theirs["created_at"].endswith("Z")
    names = [model["id"] for model in page["data"]]
    assert name in names and (page["first_id"], page["last_id"], page["has_more"]) == (names[0], names[-1], False)
    assert name not in [model["id"] for model in (*behind["data"], *before["data"])]
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_official_clients_read_models_counts_and_errors(nats: NatsRunning) -> None:
    async with system(nats) as shoal:
        name = shoal.peers.model
        claude = anthropic.AsyncAnthropic(api_key="any", base_url=shoal.url, max_retries=0)
        gpt = openai.AsyncOpenAI(api_key="any", base_url=f"{shoal.url}/v1", max_retries=0)
        async with claude, gpt:
            assert name in [model.id async for model in claude.models.list()]
            assert (await claude.models.retrieve(name)).id == name
            assert name in [model.id async for model in gpt.models.list()]
            assert (await gpt.models.retrieve(name)).id == name
            message: Any = {"role": "user", "content": "hello"}
            assert (await claude.messages.count_tokens(model=name, messages=[message])).input_tokens == 5
            with pytest.raises(anthropic.NotFoundError) as missing:
                await claude.messages.create(model="nobody", messages=[message], max_tokens=5)
            assert missing.value.request_id
            assert missing.value.type == "not_found_error"
            with pytest.raises(openai.InternalServerError) as away:
                await gpt.responses.retrieve("resp_1")
            assert away.value.status_code == 503
