"""The environment variables that vLLM, LMCache and torch read while they are imported or spawned.

Set in this process before the first import, because the engine process inherits them. Levels may be overridden
from outside; what correctness or the start depends on may not.
"""

import os
from pathlib import Path

from shoal_engine.settings import EngineSettings


def set_environment(settings: EngineSettings) -> None:
    """Before vLLM is imported."""
    # At WARNING both write a page of known facts at each start; what matters of it Shoal counts and logs itself.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # of torch, once for each of its old names
    os.environ["LMCACHE_DISABLE_BANNER"] = "1"
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["DO_NOT_TRACK"] = "1"
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(max(1, round(settings.start_timeout_s)))
    if Path(settings.model).is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["TRANSFORMERS_OFFLINE"] = "1"


def set_cpu_environment(threads: int, *, is_compiled: bool) -> None:
    """Once vLLM has found no card, before the engine process is spawned."""
    # OpenMP threads spin while they wait: more of them than free cores made decoding 20 times slower.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # Scheduler and worker in one process: half the start time, 0.6 GB less, and no hop for each step.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not is_compiled:
        # vLLM compiles small pieces of its sampler even so; the first request with logprobs waited 24 s for one.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
