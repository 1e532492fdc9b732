"""The engine contract on vLLM with a real ``lmcache server`` and a tiny random model in float32."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest
import pytest_asyncio

from shoal_engine import Engine, EngineSettings
from shoal_engine.vllm.engine import VllmEngine
from shoal_testkit.failing_store import CONNECTOR, SWITCH_VARIABLE
from shoal_testkit.models import write_tiny_model
from shoal_testkit.servers import LmcacheRunning, lmcache_running
from shoal_testkit.store_http import store_http
from shoal_testkit.suites.engine import EngineContract
from shoal_testkit.suites.engine_lab import Variant
from shoal_testkit.tiny_tokenizer import write_tiny_tokenizer
from shoal_testkit.vllm_probe import engine_process_ids, forget_engine_copies

START_S = 300.0
SWITCH = "loads-fail"


@pytest.mark.engine
@pytest.mark.timeout(1200)
@pytest.mark.logs_error("engine.died")
class TestVllm(EngineContract):
    token_range = (5, 900)
    deadline_s = 120.0

    folder: ClassVar[Path]
    lmcache: ClassVar[LmcacheRunning]

    @pytest_asyncio.fixture(scope="class", loop_scope="class", autouse=True)
    @classmethod
    async def store(cls, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[None]:
        cls.folder = tmp_path_factory.mktemp("vllm")
        write_tiny_model(cls.folder / "model", context_tokens=2048)
        cls.tokenizer_folder = write_tiny_tokenizer(cls.folder / "model")
        os.environ[SWITCH_VARIABLE] = str(cls.folder / SWITCH)
        async with lmcache_running(cls.folder / "shared") as lmcache:
            cls.lmcache = lmcache
            yield
        del os.environ[SWITCH_VARIABLE]

    @classmethod
    def make_engine(cls, variant: Variant) -> Engine:
        settings = EngineSettings(
            model=str(cls.folder / ("absent" if variant is Variant.CANNOT_START else "model")),
            dtype="bfloat16" if variant is Variant.OTHER_POOL else "float32",
            kv_memory_bytes=64 << 20,
            max_running_requests=4,
            max_step_tokens=512,
            store_port=cls.lmcache.spec.mq_port,
            store_http_port=cls.lmcache.spec.http_port,
            start_timeout_s=START_S,
        )
        return VllmEngine(settings, connector=CONNECTOR)

    async def forget_engine_copies(self, engine: Engine) -> None:
        assert isinstance(engine, VllmEngine)
        await forget_engine_copies(engine, timeout_s=self.deadline_s)

    async def forget_node_copies(self, engine: Engine, salt: str) -> None:
        async with store_http(self.lmcache.url) as store, asyncio.timeout(self.deadline_s):
            mine = {name for name in await store.objects("l1") if name.cache_salt == salt}
            while not mine <= set(await store.objects("l2")):
                await asyncio.sleep(0.05)
            await store.delete(list(mine), "l1")

    async def forget_shared_copies(self, engine: Engine) -> None:
        async with store_http(self.lmcache.url) as store, asyncio.timeout(self.deadline_s):
            await store.delete(await store.objects("l2"), "l2")

    @contextlib.asynccontextmanager
    async def failing_loads(self, engine: Engine) -> AsyncIterator[None]:
        (self.folder / SWITCH).touch()
        try:
            yield
        finally:
            (self.folder / SWITCH).unlink()

    async def break_engine(self, engine: Engine) -> None:
        assert isinstance(engine, VllmEngine)
        for process_id in engine_process_ids(engine):
            os.kill(process_id, signal.SIGKILL)
