"""The profiles that ship are read by vLLM's own parser and checked by its own classes; one of them really starts.

Here because importing vLLM takes ten seconds. No card is needed, so what depends on one is not proved here.
"""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig
from vllm.config.speculative import SpeculativeMethod
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.metrics.stats import SchedulerStats

from shoal_engine import EngineFailed, EngineRequest, EngineRole, EngineSettings, Sampling
from shoal_engine.vllm.arguments import engine_arguments
from shoal_engine.vllm.engine import CONNECTOR, VllmEngine
from shoal_engine.vllm.fingerprint import POOL_KEY
from shoal_engine.vllm.launch import StepWatch
from shoal_engine.vllm.lmcache import StoreStats, kv_parts, name_pool, store_config
from shoal_engine.vllm.profile import read_profile
from shoal_testkit.models import write_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROFILES = Path(__file__).parents[2] / "deploy" / "profiles"
MODELS = sorted((PROFILES / "models").glob("*.yaml"))
ENDPOINTS = sorted((PROFILES / "endpoints").glob("*.yaml"))
OPTIONS = sorted((PROFILES / "options").glob("*.yaml"))
NO_MODEL = str(PROFILES)  # a folder that is there: nothing is read from it, and no hub is asked for it
BLOCK_TOKENS = 256
DRAFTED_TOKENS = 7  # of one request in a step, at most

COMBINATIONS = [
    *((model,) for model in MODELS),
    *itertools.product(MODELS, ENDPOINTS),
    *((model, option) for model in MODELS[1:] for option in OPTIONS),
]


def say(paths: tuple[Path, ...], role: EngineRole) -> dict[str, Any]:
    return engine_arguments(read_profile(map(str, paths), role).arguments)


def test_the_profiles_that_were_promised_are_there() -> None:
    assert [path.stem for path in MODELS] == ["cpu-default", "deepseek-v4.1-flash", "dense-one-card"]
    assert [path.stem for path in ENDPOINTS] == ["coding-agent", "long-context-agent", "rl-rollouts", "short-chat"]


@pytest.mark.parametrize("role", EngineRole)
@pytest.mark.parametrize("paths", COMBINATIONS, ids=lambda paths: "+".join(path.stem for path in paths))
def test_vllm_takes_every_profile(paths: tuple[Path, ...], role: EngineRole) -> None:
    args = AsyncEngineArgs(model=NO_MODEL, **say(paths, role))
    CacheConfig(
        block_size=BLOCK_TOKENS,
        cache_dtype=args.kv_cache_dtype,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        prefix_cache_retention_interval=args.prefix_cache_retention_interval,
        swa_bounded_replay=args.swa_bounded_replay,
    )
    SchedulerConfig(
        max_model_len=1 << 20,
        is_encoder_decoder=False,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=args.long_prefill_token_threshold_adaptive,
        watermark=args.watermark,
        stream_interval=args.stream_interval,
        async_scheduling=args.async_scheduling,
    )
    ParallelConfig(  # without expert balancing, which vLLM allows with a card only; its own class has been checked
        tensor_parallel_size=args.tensor_parallel_size,
        data_parallel_size=args.data_parallel_size,
        data_parallel_size_local=args.data_parallel_size_local or args.data_parallel_size,
        data_parallel_hybrid_lb=args.data_parallel_hybrid_lb,
        enable_expert_parallel=args.enable_expert_parallel,
    )
    if args.speculative_config is not None:
        assert args.speculative_config["method"] in _names(SpeculativeMethod)
        assert args.max_num_batched_tokens >= args.max_num_seqs * (1 + DRAFTED_TOKENS)
    assert (args.prefix_cache_retention_interval or 0) % BLOCK_TOKENS == 0


@pytest.mark.parametrize("paths", COMBINATIONS, ids=lambda paths: "+".join(path.stem for path in paths))
def test_prefill_and_decode_of_a_profile_share_a_pool(paths: tuple[Path, ...]) -> None:
    prefill, decode = (read_profile(map(str, paths), role) for role in EngineRole)
    assert prefill.kv_traits == decode.kv_traits
    assert prefill.arguments.get("kv-cache-dtype") == decode.arguments.get("kv-cache-dtype")
    assert prefill.arguments.get("tensor-parallel-size") == decode.arguments.get("tensor-parallel-size")


@pytest.mark.parametrize("experts", [256, 384])
def test_redundant_experts_are_one_a_card_and_divide_evenly(experts: int) -> None:
    for role, cards in ((EngineRole.PREFILL, 8), (EngineRole.DECODE, 64)):
        args = AsyncEngineArgs(model=NO_MODEL, **say((PROFILES / "models" / "deepseek-v4.1-flash.yaml",), role))
        assert args.data_parallel_size == args.eplb_config.num_redundant_experts == cards
        assert (experts + args.eplb_config.num_redundant_experts) % cards == 0
        assert (args.eplb_config.window_size, args.eplb_config.step_interval) == (1000, 10000)


@pytest.mark.parametrize(
    ("profile", "sentence"),
    [
        ({"max-num-seq": 4}, "`max-num-seq` is no argument of this vLLM. Did you mean: max-num-seqs"),
        ({"spec-decode": 4}, "`spec-decode` is no argument"),
        ({"max-num-seqs": "many"}, "vLLM refuses the profile: argument --max-num-seqs: invalid int value: 'many'"),
        ({"kv-cache-dtype": "fp7"}, "vLLM refuses the profile: argument --kv-cache-dtype"),
        ({"eplb-config": {"window": 4}}, "vLLM refuses the profile: argument --eplb-config"),
        ({"eplb-config": {"window_size": 0}}, "vLLM refuses the profile: argument --eplb-config"),
        ({"enable-eplb": "yes"}, "`enable-eplb` in the profile must be true or false"),
        ({"max-num-seqs": True}, "`max-num-seqs` in the profile takes a value, not true"),
    ],
)
def test_what_vllm_does_not_take_is_refused_in_a_sentence(profile: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngineFailed) as refusal:
        engine_arguments(profile)
    assert str(refusal.value).startswith(sentence)


def test_only_what_is_said_is_set() -> None:
    said = {
        "max-num-seqs": 4,
        "async-scheduling": False,
        "cudagraph-capture-sizes": [1, 2],
        "disable-custom-all-reduce": False,
    }
    assert engine_arguments(said) == {
        "max_num_seqs": 4,
        "async_scheduling": False,
        "cudagraph_capture_sizes": [1, 2],
        "disable_custom_all_reduce": False,
    }
    assert engine_arguments({}) == {}


def test_nixl_stands_before_the_store_and_the_store_alone_gets_the_pool() -> None:
    settings = EngineSettings(model="m", store_port=5555)
    transfer = store_config(settings, CONNECTOR, has_nixl=True)
    name_pool(transfer, "qwen3-00")
    nixl, store = transfer.kv_connector_extra_config["connectors"]
    assert (transfer.kv_connector, nixl["kv_connector"]) == ("MultiConnector", "NixlConnector")
    assert (
        {part["kv_load_failure_policy"] for part in (nixl, store)} == {transfer.kv_load_failure_policy} == {"recompute"}
    )
    assert store["kv_connector_extra_config"][POOL_KEY] == "qwen3-00" and "kv_connector_extra_config" not in nixl
    assert KVConnectorFactory.supports_hma_config(transfer)

    alone = store_config(settings, CONNECTOR)
    name_pool(alone, "qwen3-00")
    assert alone.kv_connector_extra_config == store["kv_connector_extra_config"]


async def test_nixl_without_a_store_is_refused(tmp_path: Path) -> None:
    settings = EngineSettings(model=str(tmp_path), profile=(str(PROFILES / "options" / "nixl.yaml"),))
    engine = VllmEngine(settings)
    with pytest.raises(EngineFailed, match="set SHOAL_ENGINE_STORE_PORT"):
        await engine.start()
    await engine.stop()


def test_steps_of_all_data_parallel_ranks_are_one_engine() -> None:
    watch = StepWatch(None)
    assert watch.running_requests is None
    for rank, running in ((0, 3), (1, 4), (0, 2)):
        watch.record(SchedulerStats(num_running_reqs=running), None, engine_idx=rank)
    assert watch.running_requests == 6


def test_news_of_the_store_are_found_beside_nixl() -> None:
    news = StoreStats({"failed_loads": 2, "is_store_lost": True}).to_dict()
    for told in (news, {"NixlConnector": {"num_bytes": [1]}, "PooledConnector": news}, None):
        watch = StepWatch(None)
        watch.record(SchedulerStats(kv_connector_stats=told), None)
        assert (watch.failed_loads, watch.is_store_lost) == ((2, True) if told else (0, False))


@pytest.mark.parametrize(
    ("is_latent", "sizes", "count", "tells_apart"),
    [
        (False, {}, 1, True),
        (False, {"tensor_parallel_size": 4}, 4, True),
        (False, {"pipeline_parallel_size": 4}, 4, True),
        (True, {"tensor_parallel_size": 4}, 1, False),
        (True, {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}, 2, True),
    ],
)
def test_parts_of_a_block_follow_the_parallel_sizes(
    is_latent: bool, sizes: dict[str, int], count: int, tells_apart: bool
) -> None:
    model = SimpleNamespace(use_mla=is_latent, is_hybrid=False)
    parts = kv_parts(SimpleNamespace(model_config=model, parallel_config=ParallelConfig(**sizes)))
    one_card = kv_parts(SimpleNamespace(model_config=model, parallel_config=ParallelConfig()))
    assert parts.count == count
    assert (parts.shape != one_card.shape) == (tells_apart and bool(sizes))


async def test_engine_starts_with_the_default_profile_and_a_later_file_wins(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("decode: {max-num-seqs: 3}\nprefill: {max-num-seqs: 5}\nkv-cache-memory-bytes: 67108864\n")
    settings = EngineSettings(
        model=str(write_tiny_model(tmp_path / "model", context_tokens=1024)),
        dtype="float32",
        profile=(str(PROFILES / "models" / "cpu-default.yaml"), str(own)),
    )
    engine = VllmEngine(settings, role=EngineRole.DECODE)
    try:
        await engine.start()
        assert engine.description.max_running_requests == 3
        request = EngineRequest("r", tuple(range(5, 205)), sampling=Sampling(max_tokens=4, temperature=0.0))
        tokens = [token async for step in engine.generate(request) for token in step.token_ids]
        assert len(tokens) == 4
        room_tokens = engine.load().max_cached_tokens
        assert room_tokens is not None
        assert room_tokens * 4 * 2 * 2 * 32 * 4 <= 67108864  # layers, keys and values, heads, their size, float32
    finally:
        await engine.stop()


async def test_engine_with_a_wrong_profile_says_what_is_wrong(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("max-num-sequences: 4\n")
    engine = VllmEngine(EngineSettings(model=str(tmp_path), profile=(str(wrong),)))
    with pytest.raises(EngineFailed, match="`max-num-sequences` is no argument of this vLLM"):
        await engine.start()
    await engine.stop()


def _names(literal: Any) -> set[str]:
    """Of a Literal that may hold others."""
    return {name for arg in get_args(literal) for name in (_names(arg) if get_args(arg) else {arg})}
