"""Whatever happens to the files of a store, an engine answers what it computes without one, and the store mends.

In float32, token for token. The shared level lies on a small disk of its own, so that it can be full or read-only in
earnest. The engines start once for the file: each start imports vLLM.
"""

import asyncio
import contextlib
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx
import psutil
import pytest
import pytest_asyncio
from lmcache.v1.distributed.api import ObjectKey

from shoal_contracts.ids import pack_u32
from shoal_engine import EngineRequest, EngineSettings, Sampling
from shoal_engine.vllm.engine import VllmEngine
from shoal_kvblocks import block_hashes, split_hashes
from shoal_kvstore.folder import Loaded, ObjectFolder
from shoal_kvstore.object_file import HEADER_BYTES, key_of
from shoal_testkit.models import write_tiny_model
from shoal_testkit.processes import start_process
from shoal_testkit.servers import LMCACHE_START_S, LmcacheRunning, lmcache_running
from shoal_testkit.suites.engine_lab import Answer, read
from shoal_testkit.vllm_probe import engine_process_ids, forget_engine_copies

BLOCK = 128
PROMPT_TOKENS = 1000
BLOCKS = PROMPT_TOKENS // BLOCK
ANSWER_TOKENS = 24
DISK_BYTES = 256 << 20
LARGEST_FILE_BYTES = 200_000
PLACE = 3  # of the block that something happens to
WAIT_S = 30.0

seeds = itertools.count(1)

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


class Disk(Protocol):
    """Where the shared level lies; each trouble is one of the outcomes that the store counts."""

    folder: Path

    def trouble(self, kind: str, server: LmcacheRunning) -> contextlib.AbstractContextManager[str]: ...


@dataclass
class SmallDisk:
    """A file system of its own in memory: full when it is filled, read-only when it is mounted so."""

    folder: Path

    @contextlib.contextmanager
    def trouble(self, kind: str, server: LmcacheRunning) -> Iterator[str]:
        filler = self.folder.parent / "filler"
        if kind == "read_only":
            self._mount("-o", "remount,ro")
        else:
            fill(filler)
        try:
            yield kind
        finally:
            self._mount("-o", "remount,rw")
            filler.unlink(missing_ok=True)

    def _mount(self, *options: str) -> None:
        subprocess.run(["mount", *options, str(self.folder.parent)], check=True)


def fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


@dataclass
class PlainFolder:
    """Where nothing may be mounted: the server is forbidden to write files of an object's size (256 KiB)."""

    folder: Path

    @contextlib.contextmanager
    def trouble(self, kind: str, server: LmcacheRunning) -> Iterator[str]:
        pid = server.process.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, before[1]))
        try:
            yield "failed"
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def a_disk(directory: Path) -> Iterator[Disk]:
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        yield PlainFolder(directory / "shared")
        return
    try:
        yield SmallDisk(directory / "shared")
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@dataclass(slots=True)
class Lab:
    """``alone`` has no store and its own copies are dropped before each use, so it always computes everything."""

    alone: VllmEngine
    engine: VllmEngine
    lmcache: LmcacheRunning
    disk: Disk
    directory: Path
    http: httpx.AsyncClient

    async def truth(self, request: EngineRequest) -> Answer:
        answer = await answer_of(self.alone, request)
        assert answer.hit_tokens == 0
        return answer

    async def store(self, request: EngineRequest) -> list[Path]:
        """Compute the prompt; its files, in the order of its blocks, once all are on the disk."""
        await self.engine.prefill(request)
        await forget_engine_copies(self.engine)
        names = names_of(request)
        await eventually(lambda: all(self.find(name) for name in names))
        return [self.path(name) for name in names]

    async def forget(self) -> None:
        """Only the disk has copies afterwards."""
        await forget_engine_copies(self.engine)
        (await self.http.post("/cache/clear")).raise_for_status()

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.http.get("/metrics")).text
        rendered = ",".join(f'{label}="{value}"' for label, value in labels.items())
        prefix = f"shoal_store_{name}{'{' + rendered + '}' if rendered else ''} "
        return next((float(line.removeprefix(prefix)) for line in text.splitlines() if line.startswith(prefix)), 0.0)

    def find(self, name: str) -> list[Path]:
        return list(self.disk.folder.glob(f"{name[:2]}/{name}@*"))

    def path(self, name: str) -> Path:
        [path] = self.find(name)
        return path

    def unfinished(self) -> list[Path]:
        return [path for path in (self.disk.folder / ".tmp").rglob("*") if path.is_file()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    directory = tmp_path_factory.mktemp("faults")
    settings = EngineSettings(
        model=str(write_tiny_model(directory / "model", context_tokens=4096)),
        dtype="float32",
        kv_memory_bytes=64 << 20,
        max_step_tokens=1024,
    )
    async with contextlib.AsyncExitStack() as stack:
        disk = stack.enter_context(a_disk(directory / "disk"))
        lmcache = await stack.enter_async_context(lmcache_running(disk.folder))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=lmcache.url, timeout=WAIT_S, trust_env=False))
        stored = settings.model_copy(update={"store_port": lmcache.spec.mq_port})
        lab = Lab(VllmEngine(settings), VllmEngine(stored), lmcache, disk, directory, http)
        for engine in (lab.alone, lab.engine):  # together they would share two cores
            stack.push_async_callback(engine.stop)
            await engine.start()
        yield lab
        await lab.lmcache.process.stop()


def a_request() -> EngineRequest:
    """A prompt that nobody has seen."""
    draw = random.Random(next(seeds))
    prompt = [draw.randrange(1024) for _ in range(PROMPT_TOKENS)]
    return EngineRequest("r", prompt, Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0))


def names_of(request: EngineRequest) -> list[str]:
    return [name.hex() for name in split_hashes(block_hashes(pack_u32(request.token_ids), BLOCK))]


async def answer_of(engine: VllmEngine, request: EngineRequest) -> Answer:
    async with asyncio.timeout(60):
        return await read(engine, request)


async def eventually(claim: object) -> None:
    assert callable(claim)
    async with asyncio.timeout(WAIT_S):
        while not claim():
            await asyncio.sleep(0.02)


def is_whole(path: Path) -> bool:
    """Whether the file is the object that its name says."""
    key = key_of(path.name)
    assert isinstance(key, ObjectKey)
    buffer = memoryview(bytearray(max(0, path.stat().st_size - HEADER_BYTES)))
    return ObjectFolder(path.parent.parent, "a-test").load(key, buffer).outcome is Loaded.LOADED


def spoil(fault: str, paths: list[Path]) -> None:
    path, other = paths[PLACE], paths[PLACE + 1]
    content = bytearray(path.read_bytes())
    match fault:
        case "altered":
            content[-1000] ^= 1
            path.write_bytes(content)
        case "short":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.write_bytes(b"")
        case "other_key":
            path.write_bytes(other.read_bytes())
        case "missing":
            for stored in paths:
                os.utime(stored, (0, 0))
            path.unlink()


@pytest.mark.parametrize("fault", ["altered", "short", "empty", "other_key", "missing"])
async def test_a_damaged_store_changes_no_token_and_is_mended(lab: Lab, fault: str) -> None:
    request = a_request()
    truth = await lab.truth(request)
    paths = await lab.store(request)
    await lab.forget()
    spoil(fault, paths)
    counted = ("lost_objects_total", {}) if fault == "missing" else ("loaded_objects_total", {"outcome": fault})
    before = await lab.metric(counted[0], **counted[1])

    answer = await answer_of(lab.engine, request)
    assert answer.token_ids == truth.token_ids
    assert answer.hit_tokens == PLACE * BLOCK
    assert await lab.metric(counted[0], **counted[1]) == before + 1

    await forget_engine_copies(lab.engine)
    await eventually(lambda: all(path.exists() and is_whole(path) for path in paths))
    await lab.forget()
    again = await answer_of(lab.engine, request)
    assert (again.token_ids, again.hit_tokens) == (truth.token_ids, BLOCKS * BLOCK)
    assert lab.unfinished() == []


@pytest.mark.parametrize("kind", ["full", "read_only"])
async def test_a_disk_that_takes_no_writes_costs_only_the_hits(lab: Lab, kind: str) -> None:
    old, new = a_request(), a_request()
    truths = await lab.truth(old), await lab.truth(new)
    await lab.store(old)
    await lab.forget()

    with lab.disk.trouble(kind, lab.lmcache) as outcome:
        before = await lab.metric("stored_objects_total", outcome=outcome)
        answer = await answer_of(lab.engine, new)
        assert answer.token_ids == truths[1].token_ids
        await forget_engine_copies(lab.engine)
        # The answer fills one more block: 1,000 tokens and 24.
        while await lab.metric("stored_objects_total", outcome=outcome) < before + BLOCKS:
            await asyncio.sleep(0.05)
        await lab.forget()
        assert lab.unfinished() == []
        assert not any(lab.find(name) for name in names_of(new))

        found = await answer_of(lab.engine, old)  # what was stored before is there
        assert (found.token_ids, found.hit_tokens) == (truths[0].token_ids, BLOCKS * BLOCK)
        assert (await answer_of(lab.engine, new)).token_ids == truths[1].token_ids
        await lab.forget()

    paths = await lab.store(new)  # the next request stores what was missing
    assert all(is_whole(path) for path in paths)
    await lab.forget()
    again = await answer_of(lab.engine, new)
    assert (again.token_ids, again.hit_tokens) == (truths[1].token_ids, BLOCKS * BLOCK)


async def test_an_engine_that_missed_no_beat_finds_a_restarted_store(lab: Lab) -> None:
    """The engine stands still while its store dies and returns: to it no time has passed."""
    request = a_request()
    truth = await lab.truth(request)
    await lab.store(request)
    processes = [psutil.Process(pid) for pid in engine_process_ids(lab.engine)]
    processes += [child for process in processes for child in process.children(recursive=True)]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        lab.lmcache.process.kill()
        lab.lmcache.process = await start_process(lab.lmcache.process.server, lab.directory, timeout_s=LMCACHE_START_S)
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)

    async with asyncio.timeout(WAIT_S):
        while True:
            await forget_engine_copies(lab.engine)
            answer = await answer_of(lab.engine, request)
            assert answer.token_ids == truth.token_ids
            if answer.hit_tokens == BLOCKS * BLOCK:
                break
            await asyncio.sleep(0.2)
    assert await lab.metric("engines_sent_back_total") == 1
    assert not lab.engine.load().is_store_lost
