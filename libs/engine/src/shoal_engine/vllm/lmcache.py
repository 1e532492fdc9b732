"""LMCache's connector as Shoal needs it: blocks are named by pool, failed loads are counted, hits are true.

A model with several groups of KV (sliding windows, for example) is moved by the server instead of by the engine: on a
CPU LMCache moves one group only the other way.

vLLM imports this module by name inside its engine process. The scheduler's half decides what to load and counts;
the worker's half moves bytes and is LMCache's own. The store may die and return at any time: LMCache's heartbeat
(one second) turns loads into failures and later into hits again, vLLM computes what failed.
docs/decisions/0002-a-pool-is-what-can-share-kv.md
"""

import copy
import secrets
import time
from dataclasses import dataclass
from typing import Any

import zmq
from lmcache.integration.vllm.lmcache_mp_connector import (
    LMCacheMPConnector,
    build_parallel_strategy_from_vllm_config,
)
from lmcache.integration.vllm.vllm_multi_process_adapter import get_lmcache_chunk_size
from lmcache.logging import init_logger
from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from lmcache.v1.platform.devices.cpu.shm import CpuShmTensorWrapper
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from shoal_engine.api import EngineFailed, StateGroup
from shoal_engine.settings import EngineSettings
from shoal_engine.vllm.fingerprint import POOL_KEY, KvParts
from shoal_engine.vllm.state_groups import state_groups

log = init_logger(__name__)

HEARTBEAT_S = 1.0  # a dead store stalls one request for at most two of these
QUEUE_TIMEOUT_S = 10.0  # for one answer of a store that is there
STORE_POLL_S = 0.05
STORE_WAIT_S = 30.0  # for what one step stored, which takes milliseconds
SEGMENT_PREFIX = "/lmcache_kv_"  # of shared memory; `shoal up` removes what a dead engine left by it
SEPARATES_GROUPS = "shoal.separates_groups"  # answered by shoal_kvstore.level_policy
FAILED_LOADS = "failed_loads"
IS_STORE_LOST = "is_store_lost"
_PARTS = "connectors"  # vLLM's word, in the configuration of a MultiConnector


def ask_store(settings: EngineSettings) -> None:
    """The store answers and cuts prompts as this engine does. Blocks; raises EngineFailed.

    Without this a missing store is found by the engine process, which tells nobody why it ended.
    """
    address = f"{settings.store_host}:{settings.store_port}"
    client = RequestClientFactory.create(f"tcp://{address}", context=zmq.Context.instance())
    try:
        block_tokens = get_lmcache_chunk_size(client, timeout=settings.store_timeout_s)
    except TimeoutError as exc:
        raise EngineFailed(f"no lmcache server answered at {address} for {settings.store_timeout_s:g} s") from exc
    finally:
        client.close()
    if block_tokens != settings.block_tokens:
        raise EngineFailed(
            f"the lmcache server at {address} keeps blocks of {block_tokens} tokens, this engine has "
            f"{settings.block_tokens}: start it with --chunk-size {settings.block_tokens}"
        )


def check_separation(settings: EngineSettings) -> None:
    """The store keeps window layers apart from the others. Blocks; raises EngineFailed.

    Without it every block holds the window state of all its tokens, and this engine would tell groups that are none.
    """
    address = f"{settings.store_host}:{settings.store_port}"
    client = RequestClientFactory.create(f"tcp://{address}", context=zmq.Context.instance())
    try:
        call = client.server_module_call(ServerModuleCallRequest(SEPARATES_GROUPS, b""))
        is_separate = call.result(timeout=settings.store_timeout_s).payload == b"1"
    except TimeoutError:
        is_separate = False  # no module of ours answered
    finally:
        client.close()
    if not is_separate:
        raise EngineFailed(
            f"this model has sliding windows and the lmcache server at {address} does not keep them apart: "
            "start it with Shoal's server module and with --separate-object-groups"
        )


def store_config(settings: EngineSettings, connector: str, *, has_nixl: bool = False) -> KVTransferConfig:
    """vLLM's configuration of ``connector``, given as ``module:class``; ``name_pool`` adds the pool when it is known.

    With NIXL vLLM keeps two connectors: it stores to both and loads from the first that has the tokens.
    """
    module, _, name = connector.partition(":")
    every = {
        "kv_role": "kv_both",  # decode stores its answers too: they are the prefix of the next turn
        "kv_load_failure_policy": "recompute",
    }
    store = every | {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{settings.store_host}",
            "lmcache.mp.port": settings.store_port,
            "lmcache.mp.mq_timeout": QUEUE_TIMEOUT_S,
            "lmcache.mp.heartbeat_interval": HEARTBEAT_S,
            "lmcache.mp.save_decode_cache": True,
        },
    }
    if not has_nixl:
        return KVTransferConfig(**store)
    both = [every | {"kv_connector": "NixlConnector"}, store]
    return KVTransferConfig(**every, kv_connector="MultiConnector", kv_connector_extra_config={_PARTS: both})


def name_pool(transfer: KVTransferConfig, pool: str) -> None:
    """Before the engine process is started."""
    told = transfer.kv_connector_extra_config
    store = told[_PARTS][-1]["kv_connector_extra_config"] if _PARTS in told else told
    store[POOL_KEY] = pool


def kv_parts(vllm_config: VllmConfig) -> KvParts:
    """As LMCache cuts a block; heads of a latent attention are not divided among tensor parallel workers."""
    cut = build_parallel_strategy_from_vllm_config(vllm_config, n_servers=1)
    tensor = 1 if cut.mla_only else cut.tp_size
    interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
    shape = f"{cut.kv_world_size}-pp{cut.pp_size}-tp{tensor}-dcp{cut.dcp_size}-every{interleave}"
    return KvParts(cut.kv_world_size, shape)


class StoreStats(KVConnectorStats):
    """News for the engine's own process: loads that failed since the last news, and whether the store is there."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data[FAILED_LOADS] += other.data.get(FAILED_LOADS, 0)
        return self

    def reset(self) -> None:
        self.data[FAILED_LOADS] = 0

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _Load:
    request: Request
    block_ids: frozenset[int]


class PooledConnector(LMCacheMPConnector):
    """Built twice in an engine process, for the scheduler and for the worker; each is used by one thread."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        super().__init__(_for_lmcache(vllm_config, kv_cache_config), role, kv_cache_config)
        self._loads: dict[str, _Load] = {}
        self._failed_loads = 0
        self._was_store_lost = False
        self._frees_early = kv_cache_config is not None and _frees_early(kv_cache_config)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        # LMCache names an engine's segments by its process id, which engines in several containers have in common.
        CpuShmTensorWrapper.SHM_NAME_PREFIX = f"{SEGMENT_PREFIX}{secrets.token_hex(4)}_"
        try:
            super().register_kv_caches(kv_caches)
        except ConnectionError as exc:
            raise ConnectionError(
                f"the lmcache server did not register this engine within {QUEUE_TIMEOUT_S:g} s; "
                "it must run with --supported-transfer-mode auto"
            ) from exc

    def state_groups(self) -> tuple[StateGroup, ...]:
        """Of the worker's half, once it has registered its memory."""
        adapter = self.worker_adapter
        return state_groups(
            adapter.engine_group_infos, adapter.lmcache_tokens_per_chunk, _replay_tokens(self._kv_cache_config)
        )

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before each step: what the last one stored has been read before this one writes over it.

        The server reads blocks after the step that filled them. A request keeps its own until they are read, but a
        window that moves on and a preemption free some at once, and what is free is taken by the next step.
        """
        super().handle_preemptions(kv_connector_metadata)
        if self._frees_early or kv_connector_metadata.need_flush_before_forward:
            self._await_stores()

    def _await_stores(self) -> None:
        adapter = self.worker_adapter
        until_s = time.monotonic() + STORE_WAIT_S
        for future in list(adapter.store_futures.values()):
            # A store that is lost is not waited for; the heartbeat finds it out.
            while not future.wait(STORE_POLL_S) and adapter.is_healthy:
                if time.monotonic() > until_s:
                    # LMCache answers nothing when a store fails in an unforeseen way. The server counts as lost until
                    # the next heartbeat, and with it all that it was asked for.
                    log.error("store.unanswered seconds=%g", STORE_WAIT_S)
                    adapter._health_event.clear()

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            block_ids = frozenset(block_id for group in blocks.get_block_ids() for block_id in group)
            self._loads[request.request_id] = _Load(request, block_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        invalid = connector_output.invalid_block_ids
        failed = connector_output.failed_recving or ()
        for request_id, load in list(self._loads.items()):
            if request_id in failed or not load.block_ids.isdisjoint(invalid):
                self._count_failure(load.request)
                del self._loads[request_id]
        for request_id in connector_output.finished_recving or ():
            self._loads.pop(request_id, None)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._loads.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.role is not KVConnectorRole.SCHEDULER:
            return None
        is_store_lost = not self.scheduler_adapter.is_healthy
        if not self._failed_loads and is_store_lost == self._was_store_lost:
            return None
        stats = StoreStats({FAILED_LOADS: self._failed_loads, IS_STORE_LOST: is_store_lost})
        self._failed_loads, self._was_store_lost = 0, is_store_lost
        return stats

    def _count_failure(self, request: Request) -> None:
        self._failed_loads += 1
        # vLLM wrote the hit down when it began to load; where it does not look the prefix up again, that stays.
        told = request.prefill_stats
        if told is not None:
            told.set(
                num_prompt_tokens=told.num_prompt_tokens,
                num_local_cached_tokens=told.num_local_cached_tokens,
                num_external_cached_tokens=0,
            )


def _for_lmcache(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> VllmConfig:
    """The same configuration under the name that LMCache shall use; vLLM's own keeps the path."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    named = copy.copy(vllm_config)
    named.model_config = copy.copy(vllm_config.model_config)
    named.model_config.model = transfer.kv_connector_extra_config[POOL_KEY]
    if kv_cache_config is not None and _needs_server_driven(kv_cache_config):
        named.kv_transfer_config = copy.copy(transfer)
        named.kv_transfer_config.kv_connector_extra_config = {
            **transfer.kv_connector_extra_config,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        }
    return named


def _replay_tokens(config: KVCacheConfig) -> int:
    """The window that vLLM computes again after a hit instead of having it stored."""
    return max((group.kv_cache_spec.prefix_replay_tokens for group in config.kv_cache_groups), default=0)


def _needs_server_driven(config: KVCacheConfig) -> bool:
    """Whether KV must be moved by the server: the engine's own way knows one group, of full attention."""
    return len(config.kv_cache_groups) > 1 or any(isinstance(spec, SlidingWindowSpec) for spec in _specs(config))


def _frees_early(config: KVCacheConfig) -> bool:
    """Whether a running request gives back blocks that the store keeps: all but plain full attention may."""
    return any(
        spec.prefix_cacheable and (isinstance(spec, RSWASpec) or not isinstance(spec, FullAttentionSpec))
        for spec in _specs(config)
    )


def _specs(config: KVCacheConfig) -> list[KVCacheSpec]:
    return [
        spec
        for group in config.kv_cache_groups
        for spec in (
            group.kv_cache_spec.kv_cache_specs.values()
            if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
            else [group.kv_cache_spec]
        )
    ]
