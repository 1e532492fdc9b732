"""From settings to a running vLLM. Imports vLLM at the top, so it is itself imported late, in a thread.

Order: ask the store (a missing one is told at once, not after vLLM's five minutes), build vLLM's configuration from
settings and profile, name the pool from what it resolved, start the engine process. Whatever fails is one
EngineFailed; what vLLM's own process had to say about it stands in the log above.
"""

from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from shoal_engine.api import EngineFailed
from shoal_engine.settings import EngineRole, EngineSettings
from shoal_engine.vllm.arguments import engine_arguments
from shoal_engine.vllm.environment import set_cpu_environment
from shoal_engine.vllm.fingerprint import KvParts, PoolFacts, digest_folder, digest_revision, pool_name
from shoal_engine.vllm.profile import Profile, read_profile
from shoal_engine.vllm.state_groups import StateGroupsOfWorker
from shoal_engine.vllm.translation import ModelFacts


class StepWatch(PrometheusStatLogger):
    """The latest statistics of the engine's steps, kept in memory for ``load``.

    It takes the place of vLLM's Prometheus logger, which is installed where none is given: Shoal's metrics are its
    own, and that logger costs time in every step. Called on the event loop that reads the engine's outputs.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        self._running: dict[int, int] = {}  # by engine: data parallel ranks report each for themselves
        self.failed_loads = 0
        self.is_store_lost = False

    @property
    def running_requests(self) -> int | None:
        """None before the first step."""
        return sum(self._running.values()) if self._running else None

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        self._running[engine_idx] = scheduler_stats.num_running_reqs
        told = scheduler_stats.kv_connector_stats or {}
        for news in (told, *told.values()):  # with NIXL beside the store there is one entry for each
            if isinstance(news, dict) and "failed_loads" in news:
                self.failed_loads += news["failed_loads"]
                self.is_store_lost = news["is_store_lost"]

    def log_engine_initialized(self) -> None:
        """vLLM would publish its configuration as a metric here."""


class StoppedByHand(AsyncLLM):
    """vLLM shuts down once more when the object is collected; at the end of the interpreter that is a traceback."""

    def __del__(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Launched:
    """A running vLLM and the facts about it."""

    llm: AsyncLLM
    watch: StepWatch
    pool: str
    model: ModelFacts
    max_running_requests: int
    max_cached_tokens: int | None
    kv_parts: int  # objects in the store for one block of one group
    processes: tuple[BaseProcess, ...]

    @property
    def sentinels(self) -> tuple[int, ...]:
        """Each becomes readable when an engine process ends."""
        return tuple(process.sentinel for process in self.processes)

    @property
    def is_alive(self) -> bool:
        return not self.llm.errored and all(process.is_alive() for process in self.processes)

    def fail_all(self) -> None:
        """Every stream that waits ends with EngineDeadError."""
        self.llm.output_processor.propagate_error(EngineDeadError())


def launch(settings: EngineSettings, role: EngineRole | None, connector: str) -> Launched:
    """Blocks for as long as the start takes. Raises EngineFailed."""
    profile = read_profile(settings.profile, role)
    if profile.has_nixl and not settings.store_port:
        raise EngineFailed("the profile wants NIXL beside the store, and there is none: set SHOAL_ENGINE_STORE_PORT")
    is_cpu = current_platform.is_cpu()
    try:
        args = _engine_args(settings, profile, is_cpu=is_cpu)
        args.skip_tokenizer_init = not _needs_tokenizer(settings, role)
        if is_cpu:
            set_cpu_environment(settings.cpu_threads, is_compiled=not args.enforce_eager)
        if settings.store_port:
            args.kv_transfer_config = _store(settings, profile, connector)
        config = args.create_engine_config()
        parts = _parts(settings, config)
        pool = _pool(settings, profile, config, parts)
        if config.kv_transfer_config is not None:
            _name_pool(config.kv_transfer_config, pool)
        llm = StoppedByHand.from_vllm_config(config, stat_loggers=[StepWatch], disable_log_stats=True)
    except (RuntimeError, ValueError, AssertionError, OSError, ImportError, TimeoutError) as exc:
        raise EngineFailed(f"vLLM did not start with the model {settings.model}: {exc}") from exc
    assert llm.logger_manager is not None
    watch = llm.logger_manager.stat_loggers[0]
    assert isinstance(watch, StepWatch)
    processes = llm.engine_core.resources.engine_manager.processes
    return Launched(
        llm=llm,
        watch=watch,
        pool=pool,
        model=_model_facts(config),
        max_running_requests=config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size_local,
        max_cached_tokens=_room_tokens(config),
        kv_parts=parts.count,
        processes=tuple(processes),
    )


def _store(settings: EngineSettings, profile: Profile, connector: str) -> KVTransferConfig:
    from shoal_engine.vllm import lmcache  # here: an engine without a store needs no LMCache

    lmcache.ask_store(settings)
    return lmcache.store_config(settings, connector, has_nixl=profile.has_nixl)


def _name_pool(transfer: KVTransferConfig, pool: str) -> None:
    from shoal_engine.vllm import lmcache

    lmcache.name_pool(transfer, pool)


def _engine_args(settings: EngineSettings, profile: Profile, *, is_cpu: bool) -> AsyncEngineArgs:
    ours = _our_arguments(settings, is_cpu=is_cpu)
    told = engine_arguments(profile.arguments)
    if "gpu_memory_utilization" in told:
        del ours["kv_cache_memory_bytes"]  # vLLM would take it and ignore the other
    return AsyncEngineArgs(**{**ours, **told})


def _needs_tokenizer(settings: EngineSettings, role: EngineRole | None) -> bool:
    """Only constraints need one, and prefill does not look at them. A folder without one holds no constraints."""
    folder = Path(settings.model)
    return role is not EngineRole.PREFILL and (not folder.is_dir() or (folder / "tokenizer.json").is_file())


def _our_arguments(settings: EngineSettings, *, is_cpu: bool) -> dict[str, Any]:
    return dict(
        model=settings.model,
        revision=settings.revision or None,
        served_model_name=settings.shown_name,
        dtype=_dtype(settings, is_cpu=is_cpu),
        block_size=settings.block_tokens,
        max_model_len=settings.max_context_tokens,
        max_num_seqs=settings.max_running_requests,
        max_num_batched_tokens=settings.max_step_tokens,
        kv_cache_memory_bytes=settings.kv_memory_bytes,
        enable_prefix_caching=True,
        use_tqdm_on_load=False,
        enforce_eager=not settings.is_compiled,
        distributed_executor_backend="uni" if is_cpu else None,
        worker_extension_cls=f"{StateGroupsOfWorker.__module__}.{StateGroupsOfWorker.__qualname__}",
        disable_log_stats=True,
        enable_log_requests=False,
    )


def _dtype(settings: EngineSettings, *, is_cpu: bool) -> str:
    """A CPU without bfloat16 instructions emulates them: a prompt took four times as long as in float32."""
    is_bfloat16_native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if settings.dtype == "auto" and is_cpu and not is_bfloat16_native:
        return "float32"
    return settings.dtype


def _parts(settings: EngineSettings, config: VllmConfig) -> KvParts:
    if not settings.store_port:
        return KvParts()
    from shoal_engine.vllm import lmcache

    return lmcache.kv_parts(config)


def _pool(settings: EngineSettings, profile: Profile, config: VllmConfig, parts: KvParts) -> str:
    model_config, cache_config = config.model_config, config.cache_config
    if Path(settings.model).is_dir():
        model_digest = digest_folder(Path(settings.model))
    else:
        commit = getattr(model_config.hf_config, "_commit_hash", None) or settings.revision
        if not commit:
            raise EngineFailed(f"cannot tell which revision of {settings.model} this is; set SHOAL_ENGINE_REVISION")
        model_digest = digest_revision(settings.model, commit)
    dtype = str(model_config.dtype).removeprefix("torch.")
    return pool_name(
        model_config.hf_config.model_type,
        PoolFacts(
            model_digest=model_digest,
            dtype=dtype,
            kv_dtype=dtype if cache_config.cache_dtype == "auto" else cache_config.cache_dtype,
            device_kind=_device_kind(),
            block_tokens=settings.block_tokens,
            parts=parts.shape,
            traits=profile.kv_traits,
            vllm_version=vllm.__version__,
            lmcache_version=version("lmcache") if settings.store_port else "none",
        ),
    )


def _device_kind() -> str:
    """Attention kernels pack keys in their own order, on a CPU by its instruction set."""
    if current_platform.is_cpu():
        return f"cpu-{torch.backends.cpu.get_cpu_capability()}-amx{int(torch.cpu._is_amx_tile_supported())}"
    return f"{current_platform.device_type}-{current_platform.get_device_capability()}"


def _model_facts(config: VllmConfig) -> ModelFacts:
    model_config = config.model_config
    generation = model_config.try_get_generation_config()
    eos = generation.get("eos_token_id", getattr(model_config.hf_text_config, "eos_token_id", None))
    defaults = model_config.get_diff_sampling_param()
    defaults.pop("max_tokens", None)  # an answer ends where the caller or the context says
    return ModelFacts(
        vocabulary_tokens=model_config.get_vocab_size(),
        max_context_tokens=model_config.max_model_len,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        sampling_defaults=defaults,
    )


def _room_tokens(config: VllmConfig) -> int | None:
    blocks = config.cache_config.num_gpu_blocks
    return None if blocks is None else blocks * config.cache_config.block_size
