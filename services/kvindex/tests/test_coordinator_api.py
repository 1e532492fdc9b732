"""LMCache's protocol, by recorded traffic of real servers and by what a broken one might send."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from starlette.types import Message

from shoal_kvindex.coordinator_api import MAX_BODY_BYTES, CoordinatorApi, Events, WireEntry
from shoal_kvindex.directory import Namespace, Readable
from shoal_kvindex.index import Readiness
from shoal_kvindex.ingest.changes import ChangeLog, Sign, StoreSign
from shoal_kvindex.service import Domain

EXAMPLES = [
    json.loads(line)
    for line in (Path(__file__).parent / "fixtures/coordinator_examples.jsonl").read_text().splitlines()
]
REGISTRATION = {"instance_id": "nodeA", "ip": "127.0.0.1", "http_port": 18600}


class Answer(NamedTuple):
    """What the service said; ``body`` is None when it said nothing."""

    status: int
    body: Any


class Client:
    """A server's side of the protocol, without a network."""

    def __init__(self, log: ChangeLog, domain: Domain, *, is_loaded: bool = True) -> None:
        self._app = CoordinatorApi(log, domain.instances, Readiness(is_loaded)).app()

    async def send(self, method: str, path: str, body: Any = b"") -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
        await self._app(scope, receive, send)
        said = b"".join(message.get("body", b"") for message in sent)
        return Answer(sent[0]["status"], json.loads(said) if said else None)

    async def report(self, *batches: Any) -> Answer:
        return await self.send("POST", "/events", {"batches": batches})

    async def register(self) -> Answer:
        return await self.send("POST", "/instances", REGISTRATION)


@pytest.fixture
def client(domain: Domain, change_log: ChangeLog) -> Client:
    return Client(change_log, domain)


def a_batch(**fields: Any) -> dict[str, Any]:
    batch = {"instance_id": "nodeA", "incarnation": 1, "seq": 1, "event_type": "store", "tier": "l2", "shared": True}
    return batch | {"entries": []} | fields


def an_entry(**fields: Any) -> dict[str, Any]:
    key = {"chunk_hash_hex": "ab" * 32, "model_name": "pool", "kv_rank": 16777472, "object_group_id": 0}
    return {"key": key | {"cache_salt": ""} | fields, "size_bytes": 5, "token_ids": [1, 2, 3], "token_offset": 0}


@pytest.mark.parametrize("example", EXAMPLES, ids=[example["example"] for example in EXAMPLES])
async def test_recorded_request_is_answered_as_the_server_expects(client: Client, example: dict[str, Any]) -> None:
    if example["example"] in ("heartbeat_ok", "deregister_on_SIGTERM"):
        await client.register()
    body = b"" if example["body"] is None else example["body"]
    answer = await client.send(example["method"], example["path"], body)
    assert answer == (example["status"], example["response"])


async def test_recorded_store_is_found_by_match(domain: Domain, client: Client) -> None:
    batches = next(e for e in EXAMPLES if e["example"] == "events_store_l2_shared_fs")["body"]["batches"]
    await client.report(*batches)
    hashes = [bytes.fromhex(entry["key"]["chunk_hash_hex"]) for batch in batches for entry in batch["entries"]]
    run = list(domain.directory.readable_run(Namespace("models/tiny-qwen3", ""), hashes))
    assert run == [Readable(True, frozenset())] * 4


async def test_a_second_delivery_is_a_duplicate_and_an_older_life_is_stale(client: Client) -> None:
    await client.report(a_batch(incarnation=2))
    answer = await client.report(a_batch(incarnation=2), a_batch(incarnation=1), a_batch(incarnation=2, seq=2))
    assert answer.body == {"applied": 1, "duplicates": 1, "stale": 1}


def test_no_type_has_room_for_token_ids() -> None:
    assert "token_ids" not in WireEntry.__struct_fields__
    assert Events.__struct_fields__ == ("batches",)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"batches": [{}]}',
        json.dumps({"batches": [a_batch(seq=0)]}).encode(),
        json.dumps({"batches": [a_batch(instance_id="")]}).encode(),
        json.dumps({"batches": [a_batch(incarnation=2**63)]}).encode(),
        json.dumps({"batches": [a_batch(entries=[an_entry(chunk_hash_hex="zz" * 32)])]}).encode(),
        json.dumps({"batches": [a_batch(entries=[an_entry(chunk_hash_hex="ab")])]}).encode(),
        json.dumps({"batches": [a_batch(entries=[an_entry(cache_salt="a\0b")])]}).encode(),
        json.dumps({"batches": [a_batch(entries=[an_entry(object_group_id=2**31)])]}).encode(),
        json.dumps({"batches": [a_batch(entries=[an_entry(chunk_hash_hex="ab" * 31 + "  ")])]}).encode(),
        json.dumps({"batches": [a_batch(entries=[an_entry(model_name="m" * 513)])]}).encode(),
        json.dumps({"batches": [a_batch(entries=[an_entry(cache_salt="\U0001f41f" * 129)])]}).encode(),
        json.dumps({"batches": [a_batch(entries=[an_entry() | {"size_bytes": 2**62}])]}).encode(),
        json.dumps({"batches": [a_batch(instance_id="a/b")]}).encode(),
        b'{"batches":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
async def test_what_cannot_be_understood_is_refused_whole_and_moves_no_cursor(client: Client, body: bytes) -> None:
    assert (await client.send("POST", "/events", body)).status == 400
    assert (await client.report(a_batch())).body == {"applied": 1, "duplicates": 0, "stale": 0}


async def test_a_server_that_dies_while_it_sends_is_no_failure(domain: Domain, change_log: ChangeLog) -> None:
    app = CoordinatorApi(change_log, domain.instances, Readiness(True)).app()
    sent: list[Message] = []
    pieces = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Message:
        return pieces.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/events", "headers": [], "query_string": b""}
    await app(scope, receive, send)
    assert sent[0]["status"] == 400


async def test_what_is_too_large_is_refused(client: Client) -> None:
    assert (await client.send("POST", "/events", bytes(MAX_BODY_BYTES + 1))).status == 413


@pytest.mark.parametrize("fields", [{"http_port": 0}, {"ip": "user:pw@host"}, {"ip": ""}, {"instance_id": "a/b"}])
async def test_a_registration_that_is_none_is_refused(client: Client, fields: dict[str, Any]) -> None:
    assert (await client.send("POST", "/instances", REGISTRATION | fields)).status == 400


async def test_kinds_of_a_later_version_count_for_the_cursor_and_change_nothing(domain: Domain, client: Client) -> None:
    moved, deeper = a_batch(event_type="moved", entries=[an_entry()]), a_batch(seq=2, tier="l3", entries=[an_entry()])
    assert (await client.report(moved, deeper)).body["applied"] == 2
    assert domain.directory.block_count == 0


async def test_until_the_load_is_done_servers_are_asked_to_come_again(domain: Domain, change_log: ChangeLog) -> None:
    client = Client(change_log, domain, is_loaded=False)
    answers = [
        await client.register(),
        await client.send("PUT", "/instances/nodeA/heartbeat"),
        await client.report(a_batch()),
    ]
    assert [answer.status for answer in answers] == [503, 503, 503]


async def test_leaving_and_starting_anew_drop_dram_copies(domain: Domain, client: Client) -> None:
    def readable() -> list[Readable]:
        return list(domain.directory.readable_run(Namespace("pool", ""), [b"\xab" * 32]))

    store = a_batch(tier="l1", shared=False, entries=[an_entry()])
    nobody, node = Readable(False, frozenset()), Readable(False, frozenset({"nodeA"}))
    await client.register()
    await client.report(store)
    assert readable() == [node]
    assert (await client.register()).body["re_registered"] is True
    assert readable() == [nobody]
    await client.report(store | {"seq": 2})
    assert readable() == [node]
    assert (await client.send("DELETE", "/instances/nodeA")).status == 204
    assert readable() == [nobody]


async def test_a_beat_of_an_unknown_server_is_not_published_and_that_of_a_known_one_tells_all_about_it(
    client: Client, change_log: Any
) -> None:
    assert (await client.send("PUT", "/instances/nodeA/heartbeat")).status == 404
    assert change_log.published == []
    await client.register()
    await client.report(a_batch(event_type="config", capacity_bytes=1 << 40))
    assert (await client.send("PUT", "/instances/nodeA/heartbeat")).status == 200
    assert change_log.published[-1] == StoreSign("nodeA", Sign.BEAT, "127.0.0.1", 18600, 1 << 40)


async def test_only_a_shared_capacity_is_kept(domain: Domain, client: Client) -> None:
    await client.register()
    await client.report(a_batch(event_type="config", tier="l1", shared=False, capacity_bytes=5))
    assert domain.instances.shared_capacity_bytes is None
    await client.report(a_batch(event_type="config", seq=2, capacity_bytes=1 << 40))
    assert domain.instances.shared_capacity_bytes == 1 << 40


async def test_a_report_that_no_message_can_carry_is_refused(client: Client, change_log: Any) -> None:
    many = [an_entry(cache_salt=f"{number:0128}") for number in range(8_000)]
    assert (await client.report(a_batch(entries=many))).status == 413
    assert change_log.published == []
