"""The first token of a prefill job that waits behind another one and whose hit lies on the shared level only.

Told are the time from its turn (the other job is done) to its first token, and from taking it. The baseline is the
same job when nothing is prefetched while it waits. Alternating, each round with prompts of its own.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace

from rows import Row

from shoal_contracts.ids import pack_u32
from shoal_engine import Engine, EngineRequest, EngineSettings
from shoal_engine.scripted import BlockStore, ScriptedEngine, ScriptedModel, SharedMemory, Timing
from shoal_prefill.prefill_job import Answer, JobLimits, Prefilled, PrefillJob, PrefillJobs
from shoal_runtime.clock import SystemClock
from shoal_testkit.models import write_tiny_model
from shoal_testkit.servers import lmcache_running, temporary_directory
from shoal_testkit.store_http import StoreHttp, store_http
from shoal_testkit.vllm_probe import forget_engine_copies

ROUNDS = 5
HIT_TOKENS = 60 * 128
PROMPT_TOKENS = HIT_TOKENS + 60
AHEAD_TOKENS = 6000
CONTEXT_TOKENS = 8192
BUDGET_S = 120.0
# About what an 8B model has on a card that reads the shared level at 4 GB/s: 16 MiB a block, 0.25 s for the hit.
SCRIPTED_TIMING = Timing(prefill_tokens_per_s=15_000, load_bytes_per_s=4e9)
SCRIPTED_BLOCK_BYTES = 16 << 20


@dataclass(slots=True)
class Taken:
    """A job that was taken from no queue."""

    job: PrefillJob
    number: int = 1
    answers: list[Answer] = field(default_factory=list)

    def span(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    async def answer(self, answer: Answer) -> bool:
        self.answers.append(answer)
        return True

    async def claim(self) -> None:
        pass

    async def ack(self) -> None:
        pass

    async def give_back(self) -> None:
        pass

    async def terminate(self) -> None:
        pass


class EverythingStored:
    """An index that is never waited for."""

    async def is_stored(self, job: PrefillJob, block_hash: bytes, wait_s: float) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Lab:
    """A started engine and a way to leave its blocks on the shared level alone."""

    engine: Engine
    forget: Callable[[], Awaitable[None]]


@asynccontextmanager
async def scripted() -> AsyncIterator[Lab]:
    store = BlockStore(SharedMemory(), block_bytes=SCRIPTED_BLOCK_BYTES)
    model = ScriptedModel(max_context_tokens=CONTEXT_TOKENS)
    engine = ScriptedEngine(model, clock=SystemClock(), store=store, timing=SCRIPTED_TIMING)

    async def forget() -> None:
        store.drop_l1()

    await engine.start()
    yield Lab(engine, forget)
    await engine.stop()


@asynccontextmanager
async def real() -> AsyncIterator[Lab]:
    """vLLM on a tiny model and an ``lmcache server``."""
    from shoal_engine.vllm.engine import VllmEngine

    with temporary_directory("waiting") as folder:
        write_tiny_model(folder / "model", context_tokens=CONTEXT_TOKENS)
        async with lmcache_running(folder / "shared") as lmcache, store_http(lmcache.url) as store:
            settings = EngineSettings(
                model=str(folder / "model"),
                dtype="float32",
                kv_memory_bytes=128 << 20,
                store_port=lmcache.spec.mq_port,
                store_http_port=lmcache.spec.http_port,
            )
            engine = VllmEngine(settings)

            async def forget() -> None:
                await forget_engine_copies(engine)
                await _leave_on_shared_level(store)

            try:
                await engine.start()
                yield Lab(engine, forget)
            finally:
                await engine.stop()


async def _leave_on_shared_level(store: StoreHttp) -> None:
    while not set(await store.objects("l1")) <= set(await store.objects("l2")):
        await asyncio.sleep(0.05)
    await store.delete(await store.objects("l1"), "l1")


async def measure(*, is_real: bool) -> list[Row]:
    case = "vllm" if is_real else "scripted"
    told: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    async with (real if is_real else scripted)() as lab:
        await _round(lab, is_prefetching=True)  # first uses on the way
        for _ in range(ROUNDS):
            for is_prefetching, found in told.items():
                found.append(await _round(lab, is_prefetching=is_prefetching))
    rows = []
    for number, since in enumerate(("turn", "taken")):
        for is_prefetching, found in told.items():
            name = "prefetched" if is_prefetching else "not prefetched"
            values = tuple(1e3 * row[number] for row in found)
            rows.append(Row("waiting_hit", f"{case} {since}", name, "ms", values, not is_prefetching))
    rows.append(Row("waiting_hit", case, "prefetched blocks", "blocks", tuple(row[2] for row in told[True])))
    return rows


async def _round(lab: Lab, *, is_prefetching: bool) -> tuple[float, float, float]:
    """Seconds from its turn, seconds from taking it, blocks that were prefetched."""
    jobs = PrefillJobs(lab.engine, EverythingStored(), JobLimits(5, 1.0), SystemClock(), lambda settled: None)
    prompt = _tokens(PROMPT_TOKENS)
    await jobs.work(Taken(_job(lab, "before", prompt)))
    await lab.forget()
    waiting = Taken(_job(lab, "waiting", prompt))
    if is_prefetching:
        waiting.job = replace(waiting.job, expected_hit_tokens=HIT_TOKENS)
    ends: dict[str, float] = {}

    async def work(taken: Taken) -> None:
        await jobs.work(taken)
        ends[taken.job.request.request_id] = time.perf_counter()

    ahead = asyncio.create_task(work(Taken(_job(lab, "ahead", _tokens(AHEAD_TOKENS)))))
    while not lab.engine.load().running_requests:
        await asyncio.sleep(0.001)
    began_s = time.perf_counter()
    await asyncio.gather(ahead, work(waiting))
    [answer] = waiting.answers
    assert isinstance(answer, Prefilled) and answer.hit_tokens == HIT_TOKENS, answer
    return ends["waiting"] - ends["ahead"], ends["waiting"] - began_s, float(answer.prefetched_blocks)


def _tokens(count: int) -> list[int]:
    return [random.randrange(5, 900) for _ in range(count)]


def _job(lab: Lab, request_id: str, token_ids: Sequence[int]) -> PrefillJob:
    pool = lab.engine.description.pool
    return PrefillJob(pool, EngineRequest(request_id, token_ids), pack_u32(token_ids), BUDGET_S, "bench")
