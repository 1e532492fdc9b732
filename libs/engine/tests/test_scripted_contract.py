"""The scripted engine keeps every promise of the interface, so it may stand in for a real one."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest

from shoal_engine.api import Engine
from shoal_engine.scripted import BlockStore, Faults, ScriptedEngine, ScriptedModel, SharedMemory, Timing
from shoal_engine.scripted.constraint import Constraints
from shoal_runtime.clock import SystemClock
from shoal_testkit.suites.engine import EngineContract, Variant
from shoal_testkit.tiny_tokenizer import write_tiny_tokenizer

SHARED = SharedMemory()


class Lab:
    """One engine with its store and the switches that break it."""

    def __init__(self, variant: Variant, tokenizer_folder: Path) -> None:
        self.store = BlockStore(SHARED)
        self.is_load_broken = False
        self.is_step_broken = False
        self.engine = ScriptedEngine(
            ScriptedModel(
                pool="other" if variant is Variant.OTHER_POOL else "one",
                vocabulary_tokens=1000,
                max_context_tokens=700,
                max_cached_tokens=4096,
                max_step_tokens=256,
                max_running_requests=4,
                constraints=Constraints(tokenizer_folder / "tokenizer.json", 1000),
            ),
            clock=SystemClock(),
            store=self.store,
            timing=Timing(base_step_s=0.0001),
            faults=Faults(
                breaks_start=variant is Variant.CANNOT_START,
                breaks_load=lambda _: self.is_load_broken,
                breaks_step=lambda _: self.is_step_broken,
            ),
        )


class TestScriptedEngine(EngineContract):
    labs: ClassVar[dict[int, Lab]] = {}

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def tokenizer(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.tokenizer_folder = write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))

    @classmethod
    def make_engine(cls, variant: Variant) -> Engine:
        lab = Lab(variant, cls.tokenizer_folder)
        cls.labs[id(lab.engine)] = lab
        return lab.engine

    async def forget_engine_copies(self, engine: Engine) -> None:
        self.labs[id(engine)].store.drop_l1()

    async def forget_node_copies(self, engine: Engine, salt: str) -> None:
        self.labs[id(engine)].store.drop_l1()

    async def forget_shared_copies(self, engine: Engine) -> None:
        for stored in SHARED.objects():
            SHARED.remove(stored.key)

    @contextlib.asynccontextmanager
    async def failing_loads(self, engine: Engine) -> AsyncIterator[None]:
        lab = self.labs[id(engine)]
        lab.is_load_broken = True
        yield
        lab.is_load_broken = False

    async def break_engine(self, engine: Engine) -> None:
        self.labs[id(engine)].is_step_broken = True
