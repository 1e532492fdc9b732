"""CPU of a decode worker per token: ``Serve`` against ``Generate`` and against its engine alone, in one run.

    python tests/bench/decode_serve.py

A real worker process (scripted engine: one token a step for each stream) serves 1, 32 and 256 streams. The engine
alone, in this process and without gRPC, is what the worker cannot do without; ``Generate`` is the same work with a
message for each token. The three take turns.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import uvloop
from rows import Row, cpu_s, table

from shoal_contracts.ids import count_u32
from shoal_contracts.v1 import decode_pb2, decode_pb2_grpc, fleet_pb2
from shoal_decode.settings import DecodeSettings
from shoal_engine.api import EngineRequest, Sampling
from shoal_engine.scripted import BlockStore, ScriptedEngine, ScriptedModel, SharedMemory, Timing
from shoal_runtime.clock import SystemClock
from shoal_runtime.grpc import connect
from shoal_runtime.nats import connect as connect_nats
from shoal_runtime.presence import Fleet
from shoal_runtime.process import new_process
from shoal_runtime.streams import DuplexStream, TurnWriter
from shoal_testkit.builders import a_generate_request
from shoal_testkit.servers import nats_running

STREAM_COUNTS = (1, 32, 256)
PROMPT_TOKENS = 40
STEP_S = 0.02
ROUND_S = 1.0
ROUNDS = 3


@dataclass(frozen=True)
class Load:
    streams: int
    tokens_each: int

    @property
    def tokens(self) -> int:
        return self.streams * self.tokens_each


def request(pool: str, load: Load) -> decode_pb2.GenerateRequest:
    return a_generate_request(PROMPT_TOKENS, max_tokens=load.tokens_each, pool=pool)


async def by_serve(stub: "decode_pb2_grpc.DecodeAsyncStub", pool: str, load: Load) -> int:
    """Messages that one connection needed."""
    ended = asyncio.Event()
    messages = ends = tokens = 0

    def on_reply(reply: decode_pb2.ServeReply) -> None:
        nonlocal messages, ends, tokens
        messages += 1
        tokens += count_u32(reply.token_ids)
        ends += len(reply.finished) + len(reply.refused)
        if ends == load.streams:
            ended.set()

    writer = TurnWriter[decode_pb2.Place](lambda places: [decode_pb2.ServeRequest(place=places)])
    stream = DuplexStream(stub.Serve, writer, on_reply=on_reply, on_lost=lambda error: ended.set())
    for stream_id in range(load.streams):
        stream.send(decode_pb2.Place(stream_id=stream_id, request=request(pool, load)))
    await ended.wait()
    await stream.close()
    assert tokens == load.tokens, f"{tokens} of {load.tokens} tokens came"
    return messages


async def by_generate(stub: "decode_pb2_grpc.DecodeAsyncStub", pool: str, load: Load) -> int:
    """Messages that one call a request needed."""

    async def read() -> int:
        return sum([1 async for _ in stub.Generate(request(pool, load))])

    return sum(await asyncio.gather(*(read() for _ in range(load.streams))))


async def engine_alone_us(load: Load) -> float:
    model = ScriptedModel(max_running_requests=256, max_step_tokens=2048)
    engine = ScriptedEngine(
        model, clock=SystemClock(), store=BlockStore(SharedMemory()), timing=Timing(base_step_s=STEP_S)
    )
    await engine.start()

    async def read(number: int) -> None:
        prompt = [number] * PROMPT_TOKENS
        asked = EngineRequest(f"r{number}", prompt, Sampling(max_tokens=load.tokens_each))
        async for _ in engine.generate(asked):
            pass

    before_s = time.process_time()
    await asyncio.gather(*(read(number) for number in range(load.streams)))
    used_s = time.process_time() - before_s
    await engine.stop()
    return 1e6 * used_s / load.tokens


@dataclass(slots=True)
class Way:
    """One way to ask the worker."""

    run: Callable[["decode_pb2_grpc.DecodeAsyncStub", str, Load], Awaitable[int]]
    cpu_us: list[float] = field(default_factory=list)
    batches: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Worker:
    """The process that is measured."""

    pid: int
    pool: str
    stub: "decode_pb2_grpc.DecodeAsyncStub"

    async def measure(self, way: Way, load: Load) -> None:
        """CPU a token, and tokens a message."""
        before_s = cpu_s(self.pid)
        messages = await way.run(self.stub, self.pool, load)
        way.cpu_us.append(1e6 * (cpu_s(self.pid) - before_s) / load.tokens)
        way.batches.append(load.tokens / messages)


async def measure() -> list[Row]:
    """A worker of its own."""
    async with nats_running() as nats:
        environ = {
            "SHOAL_NATS_URL": nats.url,
            "SHOAL_LOG_LEVEL": "WARNING",
            "SHOAL_ENGINE_KIND": "scripted",
            "SHOAL_ENGINE_MODEL": "bench",
            "SHOAL_ENGINE_MAX_RUNNING_REQUESTS": "256",
            "SHOAL_SCRIPTED_STEP_MS": str(1e3 * STEP_S),
        }
        process = new_process("bench", DecodeSettings(nats_url=nats.url))
        child = subprocess.Popen([sys.executable, "-m", "shoal_decode"], env=os.environ | environ)
        try:
            fleet = Fleet(process, await connect_nats(process, nats.url), [fleet_pb2.DECODE])
            await fleet.start()
            member = await fleet.wait_for(fleet_pb2.DECODE, timeout_s=30)
            assert member.model is not None
            async with connect(member.address) as channel:
                worker = Worker(child.pid, member.model.pool, decode_pb2_grpc.DecodeStub(channel))
                return [row for streams in STREAM_COUNTS for row in await rounds(worker, streams)]
        finally:
            child.terminate()
            child.wait(30)
            await process.tasks.close()
            await process.stack.aclose()


async def rounds(worker: Worker, streams: int) -> list[Row]:
    """The engine alone, Serve, Generate, and again."""
    load = Load(streams, int(ROUND_S / STEP_S))
    ways = {"Serve": Way(by_serve), "Generate": Way(by_generate)}
    for way in ways.values():
        await way.run(worker.stub, worker.pool, Load(streams, 5))  # connections and allocations of the first request
    alone: list[float] = []
    for _ in range(ROUNDS):
        alone.append(await engine_alone_us(load))
        for way in ways.values():
            await worker.measure(way, load)
    case = f"{streams} stream{'s' if streams > 1 else ''}"
    rows = [Row("decode_serve", case, "engine alone", "µs/token", tuple(alone), is_baseline=True)]
    rows += [Row("decode_serve", case, name, "µs/token", tuple(way.cpu_us)) for name, way in ways.items()]
    rows.append(Row("decode_serve", case, "Serve batching", "tokens/msg", tuple(ways["Serve"].batches)))
    return rows


if __name__ == "__main__":
    print(table(uvloop.run(measure())))
