"""Prefill and decode workers as they run in production answer what one engine without a store answers.

Separate processes with real vLLM, a real `lmcache server`, kvindex, NATS and Postgres; float32, greedy, token for
token, around block borders, cold and on a hit. What the engines promise by themselves stands in test_vllm_exactness.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from shoal_contracts import subjects
from shoal_contracts.ids import pack_u32, unpack_u32
from shoal_contracts.v1 import common_pb2, decode_pb2, decode_pb2_grpc, fleet_pb2, prefill_pb2
from shoal_engine import EngineRequest, EngineSettings, Sampling
from shoal_engine.vllm.engine import VllmEngine
from shoal_runtime import nats as runtime_nats
from shoal_runtime.grpc import connect
from shoal_runtime.presence import Fleet
from shoal_runtime.process import new_process
from shoal_runtime.queues import JobQueue, ensure_prefill_queue
from shoal_runtime.servers import free_port
from shoal_runtime.settings import ServiceSettings
from shoal_testkit.builders import tokens
from shoal_testkit.models import write_tiny_model
from shoal_testkit.processes import process_running, service_command
from shoal_testkit.servers import lmcache_running, nats_running, postgres_running
from shoal_testkit.suites.engine_lab import read
from shoal_testkit.vllm_probe import forget_engine_copies
from shoal_testkit.waits import until

BLOCK = 128
PROMPT_TOKENS = (1, 127, 128, 129, 255, 256, 257, 383, 385, 1000, 2000, 3000)
ANSWER_TOKENS = 32
ANSWER_S = 120.0
TIER = "all"

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]


@dataclass(slots=True)
class System:
    """The workers, reached as a gateway reaches them, and the engine that says what is right."""

    alone: VllmEngine
    pool: str
    gateway: str
    queue: JobQueue[prefill_pb2.PrefillJob]
    decode: "decode_pb2_grpc.DecodeAsyncStub"
    answers: dict[str, prefill_pb2.PrefillAnswer] = field(default_factory=dict)

    async def prefilled(self, request_id: str, prompt: list[int]) -> prefill_pb2.PrefillDone:
        job = prefill_pb2.PrefillJob(
            request_id=request_id,
            pool=self.pool,
            tier=TIER,
            answer_subject=subjects.prefill_answer(self.gateway),
            token_ids=pack_u32(prompt),
            sampling=common_pb2.Sampling(temperature=0),
            budget_ms=int(ANSWER_S * 1000),
        )
        await self.queue.publish(job, job_id=request_id, attempt=1, expires_s=ANSWER_S)
        await until(lambda: request_id in self.answers, ANSWER_S)
        answer = self.answers[request_id]
        assert answer.WhichOneof("outcome") == "done", answer
        return answer.done

    async def decoded(self, request_id: str, prompt: list[int]) -> tuple[list[int], int]:
        """Token ids, and how many prompt tokens the decode worker did not compute."""
        request = decode_pb2.GenerateRequest(
            request_id=request_id,
            pool=self.pool,
            token_ids=pack_u32(prompt),
            sampling=common_pb2.Sampling(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True),
            budget_ms=int(ANSWER_S * 1000),
        )
        found: list[int] = []
        hit_tokens = -1
        async for reply in self.decode.Generate(request, timeout=ANSWER_S):
            hit_tokens = reply.started.hit_tokens if reply.HasField("started") else hit_tokens
            found.extend(unpack_u32(reply.token_ids))
        return found, hit_tokens

    async def truth(self, request_id: str, prompt: list[int]) -> list[int]:
        sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        await forget_engine_copies(self.alone)
        answer = await read(self.alone, EngineRequest(request_id, prompt, sampling))
        assert answer.hit_tokens == 0
        return list(answer.token_ids)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    directory: Path = tmp_path_factory.mktemp("pd")
    model = write_tiny_model(directory / "model", context_tokens=4096)
    coordinator_port = free_port()
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(nats_running())
        postgres = await stack.enter_async_context(postgres_running())
        kvindex = {
            "SHOAL_NATS_URL": nats.url,
            "SHOAL_KVINDEX_POSTGRES_URL": await postgres.create_database(),
            "SHOAL_KVINDEX_COORDINATOR_PORT": str(coordinator_port),
        }
        await stack.enter_async_context(process_running(service_command("kvindex", kvindex), directory))
        lmcache = await stack.enter_async_context(
            lmcache_running(directory / "shared", coordinator_url=f"http://127.0.0.1:{coordinator_port}")
        )
        worker = {
            "SHOAL_NATS_URL": nats.url,
            "SHOAL_ENGINE_MODEL": str(model),
            "SHOAL_ENGINE_DTYPE": "float32",
            "SHOAL_ENGINE_KV_MEMORY_BYTES": str(64 << 20),
            "SHOAL_ENGINE_STORE_PORT": str(lmcache.spec.mq_port),
            "SHOAL_ENGINE_STORE_HTTP_PORT": str(lmcache.spec.http_port),
            "SHOAL_PREFILL_HANDOFF_WAIT_MS": "10000",  # a busy machine must not turn "stored" into "unknown" here
        }
        for name in ("prefill", "decode"):  # together they would share two cores
            await stack.enter_async_context(process_running(service_command(name, worker), directory, timeout_s=300))
        alone = VllmEngine(EngineSettings(model=str(model), dtype="float32", kv_memory_bytes=64 << 20))
        stack.push_async_callback(alone.stop)
        await alone.start()

        process = new_process("gateway", ServiceSettings())
        stack.push_async_callback(process.stack.aclose)
        stack.push_async_callback(process.tasks.close)
        bus = await runtime_nats.connect(process, nats.url)
        fleet = Fleet(process, bus, [fleet_pb2.DECODE])
        await fleet.start()
        worker_found = await fleet.wait_for(fleet_pb2.DECODE, timeout_s=30)
        assert worker_found.model is not None
        channel = connect(worker_found.address)
        stack.push_async_callback(channel.close)
        pool = worker_found.model.pool
        queue = await ensure_prefill_queue(bus, pool, TIER)
        found = System(alone, pool, process.instance_id, queue, decode_pb2_grpc.DecodeStub(channel))
        await bus.subscribe(
            subjects.prefill_answer(process.instance_id),
            prefill_pb2.PrefillAnswer,
            lambda answer: found.answers.update({answer.request_id: answer}),
        )
        yield found


@pytest.mark.parametrize("prompt_tokens", PROMPT_TOKENS)
async def test_workers_answer_as_one_engine_cold_and_on_a_hit(system: System, prompt_tokens: int) -> None:
    prompt = tokens(prompt_tokens, seed=prompt_tokens, vocabulary=1024)
    truth = await system.truth("truth", prompt)
    stored_tokens = min(prompt_tokens // BLOCK * BLOCK, prompt_tokens - 1)

    cold = await system.prefilled(f"cold-{prompt_tokens}", prompt)
    assert (cold.hit_tokens, cold.miss_tokens) == (0, prompt_tokens)
    assert cold.stored == (prefill_pb2.STORED_YES if prompt_tokens >= BLOCK else prefill_pb2.STORED_NONE)
    assert await system.decoded(f"cold-{prompt_tokens}", prompt) == (truth, stored_tokens)

    again = await system.prefilled(f"again-{prompt_tokens}", prompt)
    assert again.hit_tokens == stored_tokens
    found, hit_tokens = await system.decoded(f"again-{prompt_tokens}", prompt)
    assert found == truth
    assert hit_tokens >= stored_tokens


async def test_the_next_turn_hits_what_the_decode_worker_generated(system: System) -> None:
    prompt = tokens(1000, seed=77, vocabulary=1024)
    await system.prefilled("turn-1", prompt)
    answer, _ = await system.decoded("turn-1", prompt)
    turn = [*prompt, *answer, *tokens(60, seed=78, vocabulary=1024)]
    second = await system.prefilled("turn-2", turn)
    assert second.hit_tokens >= (1000 + ANSWER_TOKENS - 1) // BLOCK * BLOCK
    assert (await system.decoded("turn-2", turn))[0] == await system.truth("truth", turn)
