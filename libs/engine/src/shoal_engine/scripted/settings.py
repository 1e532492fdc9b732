"""What only the scripted engine knows, ``SHOAL_SCRIPTED_<FIELD>``, and how one is built from settings.

Processes that are given the same ``shared_folder`` share level L2, so that a whole fleet can run without a model.
"""

import hashlib
import math
from pathlib import Path

from pydantic import Field

from shoal_contracts.ids import new_instance_id
from shoal_engine.scripted.constraint import Constraints
from shoal_engine.scripted.engine import ScriptedEngine, ScriptedModel
from shoal_engine.scripted.prefetch import Prefetcher
from shoal_engine.scripted.reporter import ReporterSettings, StoreReporter
from shoal_engine.scripted.script import Script
from shoal_engine.scripted.server import ServedPool, StoreServer
from shoal_engine.scripted.store import BlockStore, SharedFolder, SharedMemory
from shoal_engine.scripted.timing import Timing
from shoal_engine.settings import EngineSettings
from shoal_runtime.clock import SystemClock
from shoal_runtime.settings import EnvironmentSettings

DEFAULT_CONTEXT_TOKENS = 8192


class ScriptedSettings(EnvironmentSettings):
    """Timing, vocabulary and store of a scripted engine."""

    vocabulary_tokens: int = Field(49_152, ge=2, description="That of the tokenizer which shows the answers.")
    eos_token_id: int | None = Field(None, ge=0, description="Set it to let answers end by themselves.")
    prefill_tokens_per_s: float = Field(math.inf, gt=0, description="Speed of computing prompts.")
    step_ms: float = Field(0.0, ge=0, description="Of a step with no request in it.")
    step_us_per_request: float = Field(0.0, ge=0, description="What each request adds to a step.")
    step_ns_per_cached_token: float = Field(0.0, ge=0, description="What each token of running requests adds.")
    load_bytes_per_s: float = Field(math.inf, gt=0, description="Speed of blocks from L2; L1 takes no time.")
    kv_bytes_per_token: int = Field(1024, ge=1, description="With the engine's KV memory: how many tokens fit.")
    l1_blocks: int = Field(4096, ge=0, description="Room of level L1.")
    shared_folder: str = Field("", description="Level L2 for several processes; empty: this process alone.")
    shared_capacity_bytes: int = Field(0, ge=0, description="Declared room of level L2; 0 declares none.")
    store_instance_id: str = Field("", description="The store's name at kvindex; empty makes a fresh one.")
    coordinator_url: str = Field("", description="HTTP address of kvindex; empty reports to nobody.")
    store_http_port: int = Field(
        0, ge=0, le=65535, description="Where the store lists, deletes and prefetches once it reports; 0: a free port."
    )
    script: str = Field("", description="File of answers to play, for tests and demonstrations; empty: none.")
    tokenizer: str = Field("", description="tokenizer.json of the model; without it constraints are refused.")
    flush_s: float = Field(1.0, gt=0, le=60, description="How often the store reports.")


def build_scripted_engine(settings: EngineSettings) -> ScriptedEngine:
    """An engine with a store of its own, not started."""
    own = ScriptedSettings.load("scripted")
    model = _model(settings, own)
    clock = SystemClock()
    block_bytes = own.kv_bytes_per_token * model.block_tokens
    reporter: StoreReporter | None = None
    if own.coordinator_url:
        name = own.store_instance_id or new_instance_id("store")
        reporting = ReporterSettings(
            name,
            own.coordinator_url,
            flush_s=own.flush_s,
            l1_bytes=own.l1_blocks * block_bytes,
            l2_bytes=own.shared_capacity_bytes,
            block_bytes=block_bytes,
        )
        reporter = StoreReporter(reporting, clock)
    store = BlockStore(
        SharedFolder(Path(own.shared_folder)) if own.shared_folder else SharedMemory(),
        block_bytes=block_bytes,
        l1_blocks=own.l1_blocks,
        listener=reporter.listen if reporter else _unheard,
    )
    timing = Timing(
        prefill_tokens_per_s=own.prefill_tokens_per_s,
        base_step_s=own.step_ms / 1e3,
        step_s_per_request=own.step_us_per_request / 1e6,
        step_s_per_cached_token=own.step_ns_per_cached_token / 1e9,
        load_bytes_per_s=own.load_bytes_per_s,
    )
    server: StoreServer | None = None
    if reporter is not None:
        served = ServedPool(model.pool, model.block_tokens)
        server = StoreServer(store, served, Prefetcher(store, timing, clock).bring, reporter, own.store_http_port)
    return ScriptedEngine(model, clock=clock, store=store, timing=timing, server=server)


def _unheard(_: object) -> None:
    return None


def _model(settings: EngineSettings, own: ScriptedSettings) -> ScriptedModel:
    context_tokens = settings.max_context_tokens or DEFAULT_CONTEXT_TOKENS
    facts = (
        "scripted",
        settings.model,
        settings.revision,
        settings.dtype,
        settings.block_tokens,
        own.vocabulary_tokens,
    )
    return ScriptedModel(
        model=settings.shown_name,
        pool="scripted-" + hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()[:16],
        vocabulary_tokens=own.vocabulary_tokens,
        eos_token_id=own.eos_token_id,
        block_tokens=settings.block_tokens,
        max_context_tokens=context_tokens,
        max_running_requests=settings.max_running_requests,
        max_cached_tokens=max(context_tokens, settings.kv_memory_bytes // own.kv_bytes_per_token),
        max_step_tokens=settings.max_step_tokens,
        script=Script.read(Path(own.script)) if own.script else None,
        constraints=Constraints(Path(own.tokenizer), own.vocabulary_tokens) if own.tokenizer else None,
    )
