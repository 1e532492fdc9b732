"""Stored responses through gateways over real NATS, Postgres, gRPC and HTTP; the tokenizer's part is a fake's."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from shoal_contracts.ids import unpack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway import metrics
from shoal_gateway.service import GatewayService
from shoal_gateway.settings import GatewaySettings
from shoal_runtime.process import running
from shoal_testkit.chats import ChatPeers, chat_client, chat_peers, peers_running
from shoal_testkit.fake_workers import FakeDecode
from shoal_testkit.fakes import ANSWER_TOKENS, FIRST_ANSWER_TOKEN, FakeTokenizer, peer_running
from shoal_testkit.servers import NatsRunning, PostgresRunning, postgres_running
from shoal_testkit.waits import until

TEXT = "".join(map(chr, range(FIRST_ANSWER_TOKEN, FIRST_ANSWER_TOKEN + ANSWER_TOKENS)))
PATH = "/v1/responses"
STEP_S = 0.02
SLOWLY = 200  # tokens of an answer that nobody waits for


@dataclass
class System:
    """A gateway with its peers and a client."""

    peers: ChatPeers
    http: httpx.AsyncClient
    url: str

    def body(self, said: str = "hello", **fields: Any) -> dict[str, Any]:
        return {"model": self.peers.model, "input": said, "max_tokens": 2 * SLOWLY, **fields}

    async def ask(self, said: str = "hello", **fields: Any) -> httpx.Response:
        return await self.http.post(PATH, json=self.body(said, **fields))

    async def get(self, response_id: str) -> dict[str, Any]:
        told: dict[str, Any] = (await self.http.get(f"{PATH}/{response_id}")).json()
        return told

    async def until_done(self, response_id: str) -> dict[str, Any]:
        async with asyncio.timeout(10):
            while (told := await self.get(response_id))["status"] == "queued":
                await asyncio.sleep(0.02)
        return told

    def answer_slowly(self) -> None:
        self.peers.decode.step_s, self.peers.decode.answer_tokens = STEP_S, SLOWLY


@contextlib.asynccontextmanager
async def gateway(nats_url: str, postgres_url: str, model: str, **settings: Any) -> AsyncIterator[System]:
    """One gateway more, for peers that run already."""
    chosen = GatewaySettings.model_validate(
        {"nats_url": nats_url, "postgres": {"url": postgres_url}, "port": 0, "drain_s": 2, **settings}
    )
    service = GatewayService(chosen)
    async with running(service, chosen):
        url = f"http://127.0.0.1:{service.port}"
        async with chat_client(url, model) as client:
            peers = chat_peers()
            peers.model = model
            yield System(peers, client.http, url)


@contextlib.asynccontextmanager
async def system(nats: NatsRunning, postgres_url: str, **settings: Any) -> AsyncIterator[System]:
    peers = chat_peers()
    async with gateway(nats.url, postgres_url, peers.model, **settings) as shoal, peers_running(peers, nats.url):
        shoal.peers = peers
        await is_known(shoal)
        await is_stored_again(shoal)
        yield shoal


async def is_known(shoal: System) -> None:
    async with asyncio.timeout(10):
        while shoal.peers.model not in (await shoal.http.get("/v1/models")).text:
            await asyncio.sleep(0.01)


async def is_stored_again(shoal: System) -> None:
    async with asyncio.timeout(10):
        while (await shoal.http.get(f"{PATH}/resp_none")).status_code != httpx.codes.NOT_FOUND:
            await asyncio.sleep(0.02)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def not_stored() -> float:
    return metrics.CATALOGUE.value("fallbacks_total", fallback="response_not_stored")


@pytest.fixture
async def empty_url(postgres: PostgresRunning) -> str:
    return await postgres.create_database()


async def test_response_is_read_listed_and_deleted(nats: NatsRunning, empty_url: str) -> None:
    async with system(nats, empty_url) as shoal:
        told = await shoal.ask("hello")
        name = "resp_" + told.headers["x-request-id"]
        found = await shoal.get(name)
        items = (await shoal.http.get(f"{PATH}/{name}/input_items")).json()
        streamed = await shoal.http.get(f"{PATH}/{name}", params={"stream": "true"})
        included = await shoal.http.get(f"{PATH}/{name}", params={"include[]": "x", "stream": "false"})
        cancelled = await shoal.http.post(f"{PATH}/{name}/cancel")
        deleted = await shoal.http.delete(f"{PATH}/{name}")
        gone = [
            await shoal.http.get(f"{PATH}/{name}"),
            await shoal.http.get(f"{PATH}/{name}/input_items"),
            await shoal.http.post(f"{PATH}/{name}/cancel"),
            await shoal.http.delete(f"{PATH}/{name}"),
        ]
    assert (found["id"], found["status"], found["output"][0]["text"]) == (name, "completed", TEXT)
    assert [item["text"] for item in items["data"]] == ["hello"]
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")
    assert included.json() == found
    assert (cancelled.status_code, cancelled.json()["error"]["type"]) == (400, "invalid_request_error")
    assert deleted.json() == {"id": name, "object": "response", "deleted": True}
    assert [(one.status_code, one.json()["error"]["code"]) for one in gone] == [(404, "not_found")] * 4
    assert all(one.headers["x-request-id"] for one in gone)


async def test_lists_are_asked_for_rightly(nats: NatsRunning, empty_url: str) -> None:
    queries = [{"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"after": "x"}]
    async with system(nats, empty_url) as shoal:
        name = "resp_" + (await shoal.ask()).headers["x-request-id"]
        refused = [await shoal.http.get(f"{PATH}/{name}/input_items", params=query) for query in queries]
    assert [one.status_code for one in refused] == [400] * len(queries)
    assert [one.json()["error"]["param"] for one in refused] == [name for query in queries for name in query]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_next_turn_may_follow_at_once(nats: NatsRunning, empty_url: str, is_stream: bool) -> None:
    async with system(nats, empty_url) as shoal:
        previous, said = None, []
        for turn in range(4):
            told = await shoal.ask(f"<{turn}>", stream=is_stream, previous_response_id=previous)
            assert told.status_code == 200, told.text
            previous = "resp_" + told.headers["x-request-id"]
            said.append(f"<{turn}>{TEXT}")
        prompts = ["".join(map(chr, unpack_u32(one.token_ids))) for one in shoal.peers.decode.placements]
        missing = await shoal.ask(previous_response_id="resp_none")
    assert prompts == ["".join(said[:turn]) + f"<{turn}>" for turn in range(4)]
    assert missing.status_code == 404
    assert (missing.json()["error"]["code"], missing.json()["error"]["param"]) == (
        *("previous_response_not_found",),
        *("previous_response_id",),
    )


async def test_what_is_not_to_be_stored_is_not(nats: NatsRunning, empty_url: str) -> None:
    async with system(nats, empty_url) as shoal:
        told = await shoal.ask(store=False)
        found = await shoal.http.get(f"{PATH}/resp_{told.headers['x-request-id']}")
        chat = await shoal.http.post("/v1/chat/completions", json={"model": shoal.peers.model, "messages": []})
    assert (told.status_code, found.status_code) == (200, 404)
    assert chat.status_code == 200


async def test_background_response_is_polled_to_its_end(nats: NatsRunning, empty_url: str) -> None:
    async with system(nats, empty_url) as shoal:
        shoal.peers.decode.step_s = STEP_S
        told = (await shoal.ask(background=True)).json()
        running_now = await shoal.get(told["id"])
        early = await shoal.ask(previous_response_id=told["id"])
        done = await shoal.until_done(told["id"])
        late = await shoal.ask(previous_response_id=told["id"])
        again = await shoal.http.post(f"{PATH}/{told['id']}/cancel")
    assert told["status"] == running_now["status"] == "queued"
    assert (early.status_code, early.json()["error"]["param"]) == (400, "previous_response_id")
    assert (done["status"], done["output"][0]["text"]) == ("completed", TEXT)
    assert late.status_code == 200
    assert (again.status_code, again.json()) == (200, done)
    assert {finish.reason for finish in shoal.peers.tokenizer.finishes} == {pb.STOP}


async def test_background_events_are_read_and_the_response_outlives_its_reader(
    nats: NatsRunning, empty_url: str
) -> None:
    async with system(nats, empty_url) as shoal:
        shoal.peers.decode.step_s = STEP_S
        whole = await shoal.ask(background=True, stream=True)
        body = shoal.body(background=True, stream=True)
        async with shoal.http.stream("POST", PATH, json=body) as response:
            name = "resp_" + response.headers["x-request-id"]
            await anext(response.aiter_lines())
        done = await shoal.until_done(name)
    events = events_of(whole)
    assert [event["token"] for event in events if "token" in event] == [ord(letter) for letter in TEXT]
    assert events[-1]["finish"] == "STOP"
    assert (done["status"], done["output"][0]["text"]) == ("completed", TEXT)
    assert shoal.peers.decode.cancels == []


async def test_background_response_is_cancelled_with_what_it_has(nats: NatsRunning, empty_url: str) -> None:
    async with system(nats, empty_url) as shoal:
        shoal.answer_slowly()
        told = (await shoal.ask(background=True)).json()
        await until(lambda: bool(shoal.peers.decode.placements))
        await asyncio.sleep(5 * STEP_S)
        cancelled = (await shoal.http.post(f"{PATH}/{told['id']}/cancel")).json()
        found = await shoal.get(told["id"])
        await until(lambda: len(shoal.peers.decode.cancels) == 1)
    assert cancelled == found
    assert cancelled["status"] == "cancelled"
    assert TEXT.startswith(cancelled["output"][0]["text"][:ANSWER_TOKENS])
    assert [finish.reason for finish in shoal.peers.tokenizer.finishes] == [pb.CANCEL]


async def test_background_response_is_cancelled_before_it_is_placed(nats: NatsRunning, empty_url: str) -> None:
    async with system(nats, empty_url) as shoal:
        shoal.peers.prefill.delay_s = 30.0
        told = (await shoal.ask("x" * 100, background=True)).json()
        await until(lambda: bool(shoal.peers.prefill.jobs))
        cancelled = (await shoal.http.post(f"{PATH}/{told['id']}/cancel")).json()
        await until(lambda: len(shoal.peers.prefill.cancels) >= 1)
    assert (cancelled["status"], cancelled["output"]) == ("cancelled", [])


async def test_any_gateway_reads_and_cancels_what_another_one_generates(nats: NatsRunning, empty_url: str) -> None:
    async with system(nats, empty_url) as first, gateway(nats.url, empty_url, first.peers.model) as second:
        await is_stored_again(second)
        first.answer_slowly()
        told = (await first.ask(background=True)).json()
        seen = await second.get(told["id"])
        cancelled = (await second.http.post(f"{PATH}/{told['id']}/cancel")).json()
        other = (await first.ask(background=True)).json()
        deleted = await second.http.delete(f"{PATH}/{other['id']}")
        await until(lambda: len(first.peers.decode.cancels) == 2)
        gone = await first.http.get(f"{PATH}/{other['id']}")
    assert seen["status"] == "queued"
    assert cancelled["status"] == "cancelled"
    assert (deleted.status_code, gone.status_code) == (200, 404)


async def test_conversation_goes_on_at_another_gateway(nats: NatsRunning, empty_url: str) -> None:
    async with system(nats, empty_url) as first, gateway(nats.url, empty_url, first.peers.model) as second:
        await is_known(second)
        await is_stored_again(second)
        previous = None
        for turn in range(6):
            shoal = (first, second)[turn % 2]
            told = await shoal.ask("x", previous_response_id=previous, stream=True)
            assert told.status_code == 200, told.text
            previous = "resp_" + told.headers["x-request-id"]


async def test_failed_background_response_says_so(nats: NatsRunning, empty_url: str) -> None:
    async with system(nats, empty_url, place_attempts=1) as shoal:
        shoal.answer_slowly()
        told = (await shoal.ask(background=True)).json()
        await until(lambda: bool(shoal.peers.decode.placements))
        await shoal.peers.decode.lose()
        done = await shoal.until_done(told["id"])
    assert done["status"] == "failed"
    [finish] = shoal.peers.tokenizer.finishes
    assert (finish.reason, finish.HasField("failure")) == (pb.FAILURE, True)


async def test_constrained_answer_is_not_continued_elsewhere(nats: NatsRunning, empty_url: str) -> None:
    async with system(nats, empty_url) as shoal:
        shoal.answer_slowly()
        asking = asyncio.create_task(shoal.ask(constraint="{}"))
        await until(lambda: bool(shoal.peers.decode.placements))
        await asyncio.sleep(5 * STEP_S)
        other = FakeDecode(shoal.peers.decode.pool, shoal.peers.model)
        async with peer_running(other, nats.url):
            await shoal.peers.decode.lose()
            told = await asking
    assert told.status_code == 503
    assert other.placements == []
    assert not shoal.peers.prefill.jobs or not shoal.peers.prefill.jobs[0].sampling.HasField("constraint")


async def test_gateway_that_leaves_tells_what_it_loses(nats: NatsRunning, empty_url: str) -> None:
    async with system(nats, empty_url, drain_s=0.2) as first:
        async with gateway(nats.url, empty_url, first.peers.model, drain_s=0.2) as leaving:
            leaving.peers = first.peers
            await is_known(leaving)
            await is_stored_again(leaving)
            first.answer_slowly()
            told = (await leaving.ask(background=True)).json()
        found = await first.get(told["id"])
        await until(lambda: len(first.peers.decode.cancels) == 1)
    assert (found["id"], found["status"]) == (told["id"], "failed")


async def test_gateway_that_drains_waits_for_what_runs_in_the_background(nats: NatsRunning, empty_url: str) -> None:
    async with system(nats, empty_url) as first:
        async with gateway(nats.url, empty_url, first.peers.model, drain_s=5) as leaving:
            leaving.peers = first.peers
            await is_known(leaving)
            await is_stored_again(leaving)
            first.peers.decode.step_s = STEP_S
            told = (await leaving.ask(background=True)).json()
        found = await first.get(told["id"])
    assert found["status"] == "completed"


async def test_lost_tokenizer_changes_nothing_of_what_is_kept(nats: NatsRunning, empty_url: str) -> None:
    async with system(nats, empty_url) as shoal:
        shoal.peers.decode.step_s, shoal.peers.decode.answer_tokens = STEP_S, 50
        second = FakeTokenizer(shoal.peers.tokenizer.pool, shoal.peers.model)
        asking = asyncio.create_task(shoal.ask(stream=True))
        await until(lambda: bool(shoal.peers.decode.placements))
        await asyncio.sleep(10 * STEP_S)
        async with peer_running(second, nats.url):
            await shoal.peers.tokenizer.lose()
            told = await asking
            found = await shoal.get("resp_" + told.headers["x-request-id"])
    [opening] = second.openings
    shown = len(opening.prior_token_ids) // 4
    assert shown > 0
    assert opening.prior_events == shown + 1, "each token is an event, and so is the opening"
    assert len(found["output"][0]["text"]) == len([event for event in events_of(told) if "token" in event]) == 50


async def test_serving_goes_on_without_postgres_and_is_complete_with_it(nats: NatsRunning) -> None:
    async with postgres_running() as postgres:
        url = await postgres.create_database("responses")
        postgres.kill()
        peers = chat_peers()
        async with gateway(nats.url, url, peers.model) as shoal, peers_running(peers, nats.url):
            shoal.peers = peers
            await is_known(shoal)
            before = not_stored()
            headers = {"x-shoal-receipt": "1"}
            plain = await shoal.http.post(PATH, json=shoal.body(), headers=headers)
            assert not_stored() == before + 1
            name = "resp_" + plain.headers["x-request-id"]
            refused = [
                await shoal.http.get(f"{PATH}/{name}"),
                await shoal.http.delete(f"{PATH}/{name}"),
                await shoal.ask(background=True),
                await shoal.ask(previous_response_id=name),
            ]
            ready = (await shoal.http.get("/readyz")).json()
            await postgres.start()
            await is_stored_again(shoal)
            stored = await shoal.ask()
            found = await shoal.get("resp_" + stored.headers["x-request-id"])
            postgres.kill()
            lost = await shoal.ask()
            assert not_stored() == before + 2
            await postgres.start()
            await is_stored_again(shoal)
            still = await shoal.get(found["id"])
    assert plain.status_code == lost.status_code == 200
    assert json.loads(plain.headers["x-shoal-receipt"])["fallbacks"] == ["response_not_stored"]
    assert [one.status_code for one in refused] == [503] * 4
    assert all(one.headers["retry-after"] for one in refused)
    assert "postgres" in ready["reasons"] and ready["is_ready"]
    assert found["status"] == "completed" and still == found


async def test_end_of_a_background_response_waits_for_postgres(nats: NatsRunning) -> None:
    async with postgres_running() as postgres:
        url = await postgres.create_database("responses")
        async with system(nats, url) as shoal:
            shoal.peers.decode.step_s = STEP_S
            told = (await shoal.ask(background=True)).json()
            postgres.kill()
            await until(lambda: bool(shoal.peers.tokenizer.finishes))
            await asyncio.sleep(0.1)
            await postgres.start()
            await is_stored_again(shoal)
            done = await shoal.until_done(told["id"])
    assert (done["status"], done["output"][0]["text"]) == ("completed", TEXT)
