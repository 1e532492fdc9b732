"""Our parts inside a real ``lmcache server``: an engine without a model stores and loads through LMCache's client.

The server reports to a coordinator that writes everything down. What needs a model is in test_store_faults.py.
"""

import asyncio
import contextlib
import itertools
import os
import pickle
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
import zmq
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from shoal_contracts.ids import pack_u32
from shoal_kvblocks import block_hashes, split_hashes
from shoal_kvstore.object_file import HEADER_BYTES
from shoal_runtime.http import serve_on
from shoal_runtime.servers import LOOPBACK
from shoal_testkit.processes import start_process
from shoal_testkit.servers import LMCACHE_START_S, LmcacheRunning, lmcache_running

BLOCK = 128
POOL = "pool"
LAYERS, HIDDEN = 2, 8
OBJECT_BYTES = 2 * LAYERS * BLOCK * HIDDEN * 4
FILE_BYTES = OBJECT_BYTES + HEADER_BYTES
CALL_S = 20.0
OLD_S = 3600.0

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
seeds = itertools.count(1)


@dataclass
class Coordinator:
    """Answers a server as kvindex does and keeps what it says."""

    registrations: list[dict[str, Any]] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)

    async def register(self, request: Request) -> JSONResponse:
        self.registrations.append(await request.json())
        return JSONResponse({"instance_id": self.registrations[-1]["instance_id"], "re_registered": False})

    async def report(self, request: Request) -> JSONResponse:
        self.batches.extend((await request.json())["batches"])
        return JSONResponse({"applied": 1, "duplicates": 0, "stale": 0})

    async def beat(self, request: Request) -> JSONResponse:
        return JSONResponse({})

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/instances", self.register, methods=["POST"]),
                Route("/events", self.report, methods=["POST"]),
                Route("/instances/{name}/heartbeat", self.beat, methods=["PUT"]),
                Route("/instances/{name}", self.beat, methods=["DELETE"]),
            ]
        )

    def entries(self, kind: str, level: str) -> list[dict[str, Any]]:
        batches = [batch for batch in self.batches if (batch["event_type"], batch["tier"]) == (kind, level)]
        return [entry for batch in batches for entry in batch["entries"]]


@dataclass
class Store:
    """One server with its folder and its coordinator, seen from outside."""

    lmcache: LmcacheRunning
    folder: Path
    coordinator: Coordinator
    http: httpx.AsyncClient

    async def listed(self, level: str = "l2", page_size: int = 500) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        token: str | None = ""
        while token is not None:
            query = {"tier": level, "page_size": str(page_size)} | ({"page_token": token} if token else {})
            page = (await self.http.get("/cache/objects", params=query)).raise_for_status().json()
            assert len(page["entries"]) <= page_size
            entries.extend(page["entries"])
            token = page["next_page_token"]
        return entries

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.http.get("/metrics")).text
        rendered = ",".join(f'{label}="{value}"' for label, value in labels.items())
        prefix = f"shoal_store_{name}{'{' + rendered + '}' if rendered else ''} "
        return next((float(line.removeprefix(prefix)) for line in text.splitlines() if line.startswith(prefix)), 0.0)

    async def load(self, tokens: list[int]) -> int:
        """Load from the shared level to DRAM, as for a hit; how many blocks were found."""
        body = {"model_name": POOL, "world_size": 1, "token_ids": tokens}
        job = (await self.http.post("/cache/prefetches", json=body)).raise_for_status().json()
        async with asyncio.timeout(CALL_S):
            while True:
                answer = (await self.http.get(f"/cache/prefetches/{job['request_id']}")).json()
                if answer["status"] == "completed":
                    return int(answer["found_keys"])
                await asyncio.sleep(0.01)

    async def forget_dram(self) -> None:
        (await self.http.post("/cache/clear")).raise_for_status()

    def path(self, block_hash: bytes) -> Path:
        [path] = self.folder.glob(f"{block_hash[:1].hex()}/{block_hash.hex()}@*")
        return path

    def files(self) -> list[Path]:
        return [path for path in self.folder.glob("[0-9a-f][0-9a-f]/*")]


class Engine:
    """What a server sees of an engine: it registers, stores, and pings."""

    def __init__(self, lmcache: LmcacheRunning, instance_id: int) -> None:
        self.instance_id = instance_id
        self._client = RequestClientFactory.create(
            f"tcp://{LOOPBACK}:{lmcache.spec.mq_port}", context=zmq.Context.instance()
        )

    async def register(self) -> None:
        payload = RegisterEngineDrivenContextPayload(
            self.instance_id, POOL, 1, BLOCK, LAYERS, HIDDEN, "float32", False, BLOCK
        )
        await self._call(self._client.register_kv_cache_engine_driven_context(payload))

    async def store(self, tokens: list[int]) -> bool:
        blocks = len(tokens) // BLOCK
        draw = torch.Generator().manual_seed(sum(tokens))
        contents = [torch.rand((2, LAYERS, BLOCK, HIDDEN), generator=draw) for _ in range(blocks)]
        key = IPCCacheServerKey(POOL, 1, 0, tuple(tokens), 0, blocks * BLOCK, f"request-{next(seeds)}")
        return bool(await self._call(self._client.commit_store(key, self.instance_id, pickle.dumps(contents))))

    async def ping(self) -> bool:
        return bool(await self._call(self._client.ping(self.instance_id)))

    async def _call(self, future: Any) -> Any:
        return await asyncio.to_thread(future.result, timeout=CALL_S)

    def close(self) -> None:
        self._client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def store(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Store]:
    folder = tmp_path_factory.mktemp("store") / "blocks"
    coordinator = Coordinator()
    async with contextlib.AsyncExitStack() as stack:
        port = await serve_on(stack, coordinator.app(), LOOPBACK, 0)
        url = f"http://{LOOPBACK}:{port}"
        lmcache = await stack.enter_async_context(lmcache_running(folder, coordinator_url=url))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=lmcache.url, timeout=CALL_S, trust_env=False))
        yield Store(lmcache, folder, coordinator, http)


@pytest_asyncio.fixture(loop_scope="module")
async def engine(store: Store) -> AsyncIterator[Engine]:
    engine = Engine(store.lmcache, 7)
    await engine.register()
    yield engine
    engine.close()


def a_prompt(blocks: int) -> list[int]:
    seed = next(seeds)
    return [seed * 100_000 + place for place in range(blocks * BLOCK)]


def hashes(tokens: list[int]) -> list[bytes]:
    return split_hashes(block_hashes(pack_u32(tokens), BLOCK))


def keys_of(entries: list[dict[str, Any]]) -> set[str]:
    return {entry["key"]["chunk_hash_hex"] for entry in entries}


async def stored(store: Store, engine: Engine, blocks: int) -> tuple[list[int], list[bytes]]:
    """A prompt whose blocks are on the disk and no longer in DRAM."""
    tokens = a_prompt(blocks)
    assert await engine.store(tokens)
    expected = {block_hash.hex() for block_hash in hashes(tokens)}
    await eventually(lambda: expected <= keys_of(store.coordinator.entries("store", "l2")))
    await store.forget_dram()
    return tokens, hashes(tokens)


async def eventually(claim: Any) -> None:
    async with asyncio.timeout(CALL_S):
        while not claim():
            await asyncio.sleep(0.01)


async def test_the_server_declares_a_shared_store_with_its_room(store: Store) -> None:
    await eventually(lambda: any(batch["tier"] == "l2" for batch in store.coordinator.batches))
    [config] = [
        batch
        for batch in store.coordinator.batches
        if (batch["event_type"], batch["tier"], batch["capacity_revision"]) == ("config", "l2", 1)
    ]
    stat = os.statvfs(store.folder)
    assert (config["backend"], config["shared"]) == ("plugin", True)
    assert config["capacity_bytes"] == pytest.approx(stat.f_frsize * stat.f_bavail, rel=0.1)


async def test_what_is_stored_is_reported_listed_and_loaded(store: Store, engine: Engine) -> None:
    tokens, names = await stored(store, engine, 6)
    reported = [
        entry
        for entry in store.coordinator.entries("store", "l2")
        if bytes.fromhex(entry["key"]["chunk_hash_hex"]) in names
    ]
    assert len(reported) == 6
    assert {entry["size_bytes"] for entry in reported} == {FILE_BYTES}
    assert {store.path(name).stat().st_size for name in names} == {FILE_BYTES}
    batches = [batch for batch in store.coordinator.batches if batch["tier"] == "l2" and batch["entries"]]
    assert {(batch["backend"], batch["shared"]) for batch in batches} == {("plugin", True)}

    for page_size in (1, 4, 500):
        entries = await store.listed(page_size=page_size)
        assert {name.hex() for name in names} <= keys_of(entries)
        assert len(entries) == len(store.files())
        first_bytes = [entry["key"]["chunk_hash_hex"][:2] for entry in entries]
        assert first_bytes == sorted(first_bytes)
        assert {entry["size_bytes"] for entry in entries} == {FILE_BYTES}

    assert await store.listed("l1") == []
    assert await store.load(tokens) == 6
    in_dram = await store.listed("l1", page_size=4)
    assert keys_of(in_dram) == {name.hex() for name in names}
    assert {entry["size_bytes"] for entry in in_dram} == {OBJECT_BYTES}


async def test_a_page_token_of_somebody_else_is_a_bad_request(store: Store) -> None:
    for level in ("l1", "l2"):
        answer = await store.http.get("/cache/objects", params={"tier": level, "page_token": "nonsense"})
        assert answer.status_code == 400


async def test_deleting_removes_files_and_is_reported_also_for_what_was_gone(store: Store, engine: Engine) -> None:
    _, names = await stored(store, engine, 3)
    store.path(names[0]).unlink()
    keys = [entry["key"] for entry in await store.listed() if bytes.fromhex(entry["key"]["chunk_hash_hex"]) in names]
    keys.append(keys[0] | {"chunk_hash_hex": names[0].hex()})
    body = {"keys": keys, "tier": "l2", "force": False}
    answer = (await store.http.request("DELETE", "/cache/objects", json=body)).raise_for_status().json()
    assert answer["ok"]
    expected = {name.hex() for name in names}
    await eventually(lambda: expected <= keys_of(store.coordinator.entries("delete", "l2")))
    assert not expected & keys_of(await store.listed())


@pytest.mark.parametrize("damage", ["altered", "short", "empty", "other_key", "missing"])
async def test_a_damaged_file_is_a_miss_and_is_stored_again(store: Store, engine: Engine, damage: str) -> None:
    tokens, names = await stored(store, engine, 6)
    path = store.path(names[3])
    content = path.read_bytes()
    before = await store.metric("loaded_objects_total", outcome=damage)
    lost_before = await store.metric("lost_objects_total")
    match damage:
        case "altered":
            path.write_bytes(content[:-100] + bytes([content[-100] ^ 4]) + content[-99:])
        case "short":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.write_bytes(b"")
        case "other_key":
            path.write_bytes(store.path(names[4]).read_bytes())
        case "missing":
            for name in names:
                os.utime(store.path(name), (0, store.path(name).stat().st_mtime - OLD_S))
            path.unlink()

    assert await store.load(tokens) == 5  # a prefetch takes what there is; that a hit ends at the gap needs an engine
    await eventually(lambda: names[3].hex() in keys_of(store.coordinator.entries("delete", "l2")))
    if damage == "missing":
        assert await store.metric("lost_objects_total") == lost_before + 1
    else:
        assert await store.metric("loaded_objects_total", outcome=damage) == before + 1
    assert names[3].hex() not in keys_of(await store.listed())

    await store.forget_dram()
    assert await engine.store(tokens)
    await eventually(lambda: any(store.folder.glob(f"*/{names[3].hex()}@*")))
    assert store.path(names[3]).read_bytes() == content
    await store.forget_dram()
    assert await store.load(tokens) == 6


async def test_a_store_of_what_is_there_is_reported_again(store: Store, engine: Engine) -> None:
    tokens, names = await stored(store, engine, 2)
    store.coordinator.batches.clear()
    assert await engine.store(tokens)
    await eventually(lambda: {name.hex() for name in names} <= keys_of(store.coordinator.entries("store", "l2")))
    assert await store.metric("stored_objects_total", outcome="present") >= 2


async def test_an_engine_that_the_server_does_not_know_is_sent_back_once(store: Store) -> None:
    unknown = Engine(store.lmcache, 4711)
    before = await store.metric("engines_sent_back_total")
    assert [await unknown.ping() for _ in range(3)] == [False, True, True]
    await unknown.register()
    assert await unknown.ping() is True
    assert await store.metric("engines_sent_back_total") == before + 1
    unknown.close()


async def test_a_killed_server_comes_back_with_its_files_and_without_its_leftovers(
    store: Store, engine: Engine
) -> None:
    tokens, _ = await stored(store, engine, 4)
    store.lmcache.process.kill()
    unfinished = store.folder / ".tmp" / store.lmcache.spec.instance_id / "1-1"
    unfinished.write_bytes(b"half")
    (store.folder / "pool@0x01000100@0@00.data").write_bytes(b"of LMCache's own adapter")
    store.lmcache.process = await start_process(
        store.lmcache.process.server, store.folder.parent, timeout_s=LMCACHE_START_S
    )
    output = store.lmcache.process.output
    assert output.count("store.foreign_files_ignored count=1") == 1
    assert not unfinished.exists()
    assert await engine.ping() is False  # it has not missed a beat, and is sent back
    assert await engine.ping() is True
    await engine.register()
    assert await store.load(tokens) == 4
    assert await engine.store(a_prompt(2))
