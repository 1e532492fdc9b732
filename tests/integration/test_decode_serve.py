"""A decode worker over real gRPC and NATS, on the scripted engine: what a gateway sees, what the engine keeps."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio
import pytest

from shoal_contracts import subjects
from shoal_contracts.errors import BadRequest, Refused, ShoalError
from shoal_contracts.ids import pack_u32, unpack_u32
from shoal_contracts.v1 import common_pb2, decode_pb2, decode_pb2_grpc, fleet_pb2
from shoal_decode import metrics
from shoal_decode.service import DecodeService
from shoal_decode.settings import DecodeSettings
from shoal_engine.api import EngineRequest
from shoal_engine.scripted import BlockStore, Faults, ScriptedEngine, ScriptedModel, SharedMemory, Timing
from shoal_engine.scripted.sequence import TokenChain
from shoal_runtime.clock import SystemClock
from shoal_runtime.grpc import connect, to_shoal_error
from shoal_runtime.nats import connect as connect_nats
from shoal_runtime.process import Process, new_process, running
from shoal_runtime.streams import DuplexStream, TurnWriter
from shoal_testkit.builders import POOL, a_generate_request, tokens
from shoal_testkit.servers import NatsRunning

MODEL = ScriptedModel(
    pool=POOL, vocabulary_tokens=1000, max_context_tokens=4000, max_cached_tokens=100_000, max_running_requests=64
)
STEP_S = 0.002
DEADLINE_S = 20.0


def answer_of(prompt: Sequence[int], count: int) -> list[int]:
    """What the scripted engine says to a prompt."""
    chain, answer = TokenChain(MODEL.vocabulary_tokens, prompt), []
    for _ in range(count):
        answer.append(chain.choose())
        chain.add(answer[-1])
    return answer


@dataclass
class Worker:
    """A running decode service and the engine inside it."""

    engine: ScriptedEngine
    process: Process
    service: DecodeService
    address: str

    async def until_idle(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.engine.load().running_requests + self.engine.load().waiting_requests:
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def working(
    nats: NatsRunning, *, faults: Faults | None = None, timing: Timing | None = None, **settings: object
) -> AsyncIterator[Worker]:
    timing = timing or Timing(base_step_s=STEP_S)
    engine = ScriptedEngine(MODEL, clock=SystemClock(), store=BlockStore(SharedMemory()), timing=timing, faults=faults)
    chosen = DecodeSettings.model_validate({"nats_url": nats.url, "drain_s": 5, "check_each_s": 0.02, **settings})
    service = DecodeService(chosen, engine)
    async with running(service, chosen) as process:
        yield Worker(engine, process, service, service.address)


@dataclass
class Told:
    """What a gateway was told of one stream."""

    is_accepted: bool = False
    refused: common_pb2.Failure | None = None
    hit_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    finished: decode_pb2.Finished | None = None


class Gateway:
    """The client's end of Serve."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.told: dict[int, Told] = defaultdict(Told)
        self.lost: ShoalError | None = None
        self.replies = 0
        self._news = asyncio.Event()
        writer = TurnWriter[decode_pb2.ServeRequest](lambda requests: requests)
        self.stream = DuplexStream(
            decode_pb2_grpc.DecodeStub(channel).Serve, writer, on_reply=self._on_reply, on_lost=self._on_lost
        )

    def place(self, stream_id: int, request: decode_pb2.GenerateRequest) -> None:
        self.stream.send(decode_pb2.ServeRequest(place=[decode_pb2.Place(stream_id=stream_id, request=request)]))

    def cancel(self, *stream_ids: int) -> None:
        self.stream.send(decode_pb2.ServeRequest(cancel=pack_u32(stream_ids)))

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not is_so():
                self._news.clear()
                await self._news.wait()

    async def end_of(self, stream_id: int) -> Told:
        told = self.told[stream_id]
        await self.until(lambda: told.finished is not None or told.refused is not None)
        return told

    def _on_lost(self, error: ShoalError) -> None:
        self.lost = error
        self._news.set()

    def _on_reply(self, reply: decode_pb2.ServeReply) -> None:
        self.replies += 1
        for accepted in reply.accepted:
            self.told[accepted.stream_id].is_accepted = True
        for refused in reply.refused:
            self.told[refused.stream_id].refused = refused.failure
        for started in reply.started:
            assert not self.told[started.stream_id].token_ids
            self.told[started.stream_id].hit_tokens = started.hit_tokens
        token_ids, first = unpack_u32(reply.token_ids), 0
        for stream_id, count in zip(unpack_u32(reply.stream_ids), unpack_u32(reply.counts), strict=True):
            told = self.told[stream_id]
            assert told.is_accepted
            assert told.finished is None
            told.token_ids += token_ids[first : first + count]
            first += count
        assert first == len(token_ids)
        for logprobs in reply.logprobs:
            self.told[logprobs.stream_id].logprobs += logprobs.tokens
        for finished in reply.finished:
            assert self.told[finished.stream_id].finished is None
            self.told[finished.stream_id].finished = finished
        self._news.set()


@contextlib.asynccontextmanager
async def gateway_at(worker: Worker) -> AsyncIterator[Gateway]:
    channel = connect(worker.address)
    gateway = Gateway(channel)
    yield gateway
    await gateway.stream.close()
    await channel.close()


async def test_many_streams_share_messages_and_get_their_own_tokens(nats: NatsRunning) -> None:
    async with working(nats) as worker, gateway_at(worker) as gateway:
        for stream_id in range(1, 33):
            gateway.place(stream_id, a_generate_request(40, seed=stream_id, max_tokens=30))
        for stream_id in range(1, 33):
            told = await gateway.end_of(stream_id)
            assert told.token_ids == answer_of(tokens(40, stream_id), 30)
            assert told.hit_tokens == 0
            assert told.finished is not None
            assert (told.finished.reason, told.finished.completion_tokens) == (common_pb2.LENGTH, 30)
        assert gateway.replies < 32 * 30 / 8
        assert worker.engine.aborted_requests == 0


async def test_second_turn_hits_the_first_and_its_answer(nats: NatsRunning) -> None:
    async with working(nats) as worker, gateway_at(worker) as gateway:
        gateway.place(1, a_generate_request(200, max_tokens=100))
        first = await gateway.end_of(1)
        request = a_generate_request()
        request.token_ids = pack_u32([*tokens(200), *first.token_ids, 1, 2, 3])
        gateway.place(2, request)
        assert (await gateway.end_of(2)).hit_tokens == 256  # whole blocks of 128 among 300 tokens


async def test_cancel_aborts_once_and_other_streams_go_on(nats: NatsRunning) -> None:
    async with working(nats) as worker, gateway_at(worker) as gateway:
        gateway.place(1, a_generate_request(max_tokens=3000))
        gateway.place(2, a_generate_request(seed=2, max_tokens=60))
        await gateway.until(lambda: len(gateway.told[1].token_ids) > 3)
        gateway.cancel(1, 77)
        gateway.cancel(1)
        told = await gateway.end_of(1)
        assert told.finished is not None
        assert told.finished.reason == common_pb2.CANCEL
        assert not told.finished.HasField("failure")
        assert told.finished.completion_tokens == len(told.token_ids)
        assert (await gateway.end_of(2)).token_ids == answer_of(tokens(300, 2), 60)
        gateway.cancel(2)
        await worker.until_idle()
        assert worker.engine.aborted_requests == 1


async def test_cancel_in_the_same_message_as_its_placement(nats: NatsRunning) -> None:
    async with working(nats) as worker, gateway_at(worker) as gateway:
        place = decode_pb2.Place(stream_id=5, request=a_generate_request())
        gateway.stream.send(decode_pb2.ServeRequest(place=[place], cancel=pack_u32([5])))
        told = await gateway.end_of(5)
        assert told.is_accepted
        assert told.finished is not None
        assert told.finished.reason == common_pb2.CANCEL
        await worker.until_idle()
        assert worker.engine.aborted_requests == 0  # it never reached the engine


async def test_lost_stream_aborts_each_of_its_requests_once(nats: NatsRunning) -> None:
    async with working(nats) as worker, gateway_at(worker) as other:
        other.place(1, a_generate_request(seed=9, max_tokens=200))
        async with gateway_at(worker) as gateway:
            for stream_id in range(1, 6):
                gateway.place(stream_id, a_generate_request(seed=stream_id, max_tokens=3000))
            await gateway.until(lambda: all(gateway.told[i].token_ids for i in range(1, 6)))
            gateway.cancel(5)
        assert (await other.end_of(1)).token_ids == answer_of(tokens(300, 9), 200)
        await worker.until_idle()
        assert worker.engine.aborted_requests == 5


async def test_full_worker_refuses_and_takes_again_when_room_is_there(nats: NatsRunning) -> None:
    async with working(nats, max_running_requests=2) as worker, gateway_at(worker) as gateway:
        for stream_id in (1, 2, 3):
            gateway.place(stream_id, a_generate_request(seed=stream_id, max_tokens=3000))
        refused = (await gateway.end_of(3)).refused
        assert refused is not None
        assert refused.code == common_pb2.OVERLOADED
        assert refused.retry_after_ms > 0
        gateway.cancel(1)
        await gateway.end_of(1)
        gateway.place(4, a_generate_request(seed=4, max_tokens=2))
        assert (await gateway.end_of(4)).finished is not None
        gateway.cancel(2)
        await gateway.end_of(2)


async def test_bad_placements_are_refused_alone(nats: NatsRunning) -> None:
    async with working(nats, max_local_prefill_tokens=0) as worker, gateway_at(worker) as gateway:
        cases = {1: common_pb2.POOL_MISMATCH, 2: common_pb2.CONTEXT_LENGTH_EXCEEDED, 3: common_pb2.INVALID_REQUEST}
        cases |= {4: common_pb2.INVALID_REQUEST, 5: common_pb2.OVERLOADED}
        gateway.place(1, a_generate_request(pool="another"))
        gateway.place(2, a_generate_request(4000))
        gateway.place(3, decode_pb2.GenerateRequest(pool=POOL, request_id="r", token_ids=b"odd", budget_ms=1000))
        no_budget = a_generate_request()
        no_budget.budget_ms = 0
        gateway.place(4, no_budget)
        local = a_generate_request()
        local.is_local_prefill = True
        gateway.place(5, local)
        for stream_id, code in cases.items():
            refused = (await gateway.end_of(stream_id)).refused
            assert refused is not None
            assert refused.code == code
        gateway.place(6, a_generate_request())
        assert (await gateway.end_of(6)).finished is not None


async def test_stream_number_in_use_ends_the_connection(nats: NatsRunning) -> None:
    async with working(nats) as worker, gateway_at(worker) as gateway:
        gateway.place(1, a_generate_request(max_tokens=3000))
        gateway.place(1, a_generate_request(max_tokens=3000))
        await gateway.until(lambda: gateway.lost is not None)
        assert isinstance(gateway.lost, BadRequest)
        await worker.until_idle()


async def test_resume_goes_on_after_the_tokens_already_sent(nats: NatsRunning) -> None:
    async with working(nats) as worker, gateway_at(worker) as gateway:
        whole = answer_of(tokens(300), 20)
        request = a_generate_request(max_tokens=20)
        request.resumed_token_ids = pack_u32(whole[:7])
        gateway.place(1, request)
        told = await gateway.end_of(1)
        assert told.token_ids == whole[7:]
        assert told.finished is not None
        assert told.finished.completion_tokens == 20


async def test_stop_token_and_logprobs_are_told(nats: NatsRunning) -> None:
    async with working(nats) as worker, gateway_at(worker) as gateway:
        whole = answer_of(tokens(300), 10)
        request = a_generate_request(max_tokens=10)
        request.sampling.stop_token_ids.append(whole[6])
        request.sampling.logprobs = 2
        gateway.place(1, request)
        told = await gateway.end_of(1)
        assert told.token_ids == whole[:6]
        assert told.finished is not None
        assert (told.finished.reason, told.finished.stop_token_id) == (common_pb2.STOP, whole[6])
        assert told.finished.completion_tokens == 6
        assert [unpack_u32(entry.top_token_ids)[0] for entry in told.logprobs] == whole[:6]
        assert all(len(entry.top_logprobs) == 2 and entry.logprob < 0 for entry in told.logprobs)


async def test_spent_budget_is_a_deadline_failure_and_one_abort(nats: NatsRunning) -> None:
    async with working(nats) as worker, gateway_at(worker) as gateway:
        request = a_generate_request(max_tokens=3000)
        request.budget_ms = 60
        gateway.place(1, request)
        told = await gateway.end_of(1)
        assert told.token_ids
        assert told.finished is not None
        assert told.finished.reason == common_pb2.FAILURE
        assert told.finished.failure.code == common_pb2.DEADLINE_EXCEEDED
        await worker.until_idle()
        assert worker.engine.aborted_requests == 1


async def test_draining_worker_finishes_what_runs_and_refuses_the_rest(nats: NatsRunning) -> None:
    async with working(nats) as worker, gateway_at(worker) as gateway:
        gateway.place(1, a_generate_request(max_tokens=100))
        await gateway.until(lambda: bool(gateway.told[1].token_ids))
        draining = asyncio.create_task(worker.service.drain())
        await asyncio.sleep(0)
        gateway.place(2, a_generate_request())
        refused = (await gateway.end_of(2)).refused
        assert refused is not None
        assert refused.code == common_pb2.DRAINING
        assert len((await gateway.end_of(1)).token_ids) == 100
        async with asyncio.timeout(DEADLINE_S):
            await draining


async def test_stopping_worker_tells_what_it_could_not_finish(nats: NatsRunning) -> None:
    async with contextlib.AsyncExitStack() as outer:
        async with working(nats, drain_s=0.05) as worker:
            gateway = await outer.enter_async_context(gateway_at(worker))
            gateway.place(1, a_generate_request(max_tokens=3000))
            await gateway.until(lambda: bool(gateway.told[1].token_ids))
        told = await gateway.end_of(1)
        assert told.finished is not None
        assert told.finished.failure.code == common_pb2.DRAINING
        assert told.finished.completion_tokens == len(told.token_ids)
        await gateway.until(lambda: gateway.lost is not None)
        assert worker.engine.aborted_requests == 1


@pytest.mark.logs_error("process.failed")
async def test_dead_engine_fails_streams_and_readiness_with_a_reason(nats: NatsRunning) -> None:
    async with (
        working(nats, faults=Faults(breaks_step=lambda step: step == 5)) as worker,
        gateway_at(worker) as gateway,
    ):
        gateway.place(1, a_generate_request(max_tokens=3000))
        told = await gateway.end_of(1)
        assert told.finished is not None
        assert told.finished.failure.code == common_pb2.ENGINE_FAILED
        async with asyncio.timeout(DEADLINE_S):
            await worker.process.stopping.wait()
        assert "step 5" in worker.process.health.report["engine"]
        gateway.place(2, a_generate_request())
        assert (await gateway.end_of(2)).refused is not None


async def test_lost_store_is_told_and_the_worker_stays_ready(nats: NatsRunning) -> None:
    is_lost = True
    async with working(nats, faults=Faults(loses_store=lambda: is_lost)) as worker, gateway_at(worker) as gateway:
        async with asyncio.timeout(DEADLINE_S):
            while metrics.CATALOGUE.value("store_lost") == 0:
                await asyncio.sleep(0.005)
            assert worker.process.health.is_ready
            assert worker.process.health.report == {"store": "away; prompts are computed without it"}
            gateway.place(1, a_generate_request())
            assert (await gateway.end_of(1)).token_ids == answer_of(tokens(300), 8)
            is_lost = False
            while metrics.CATALOGUE.value("store_lost") == 1:
                await asyncio.sleep(0.005)
            assert worker.process.health.report == {}


async def test_beats_tell_address_model_and_load(nats: NatsRunning) -> None:
    listener = new_process("listener", DecodeSettings(nats_url=nats.url))
    beats: asyncio.Queue[fleet_pb2.Beat] = asyncio.Queue()
    connection = await connect_nats(listener, nats.url)
    await connection.subscribe(subjects.beats(fleet_pb2.DECODE), fleet_pb2.Beat, beats.put_nowait)
    async with asyncio.timeout(DEADLINE_S), working(nats) as worker, gateway_at(worker) as gateway:
        gateway.place(1, a_generate_request(max_tokens=3000))
        await gateway.until(lambda: bool(gateway.told[1].token_ids))
        while (beat := await beats.get()).load.running_requests == 0:
            pass
        assert (beat.address, beat.is_ready, beat.is_draining) == (worker.address, True, False)
        assert (beat.model.pool, beat.model.block_tokens, beat.model.max_context_tokens) == (POOL, 128, 4000)
        assert (beat.load.max_running_requests, beat.load.max_cached_tokens) == (64, 100_000)
        assert beat.load.cached_tokens > 300
        gateway.cancel(1)
        await gateway.end_of(1)
    async with asyncio.timeout(DEADLINE_S):
        while not (await beats.get()).is_draining:
            pass
    await listener.tasks.close()
    await listener.stack.aclose()


async def test_gateway_that_does_not_read_loses_its_streams_and_nobody_elses(nats: NatsRunning) -> None:
    before = metrics.CATALOGUE.value("streams_total", outcome="unread")
    async with working(nats, timing=Timing(), max_unread_tokens=64) as worker, gateway_at(worker) as gateway:
        channel = connect(worker.address)
        deaf = decode_pb2_grpc.DecodeStub(channel).Serve()
        heavy = a_generate_request(max_tokens=3600)
        heavy.sampling.logprobs = 20
        places = [decode_pb2.Place(stream_id=i, request=heavy) for i in range(1, 16)]
        await deaf.write(decode_pb2.ServeRequest(place=places))
        async with asyncio.timeout(DEADLINE_S):
            while metrics.CATALOGUE.value("streams_total", outcome="unread") < before + 15:
                await asyncio.sleep(0.01)
        gateway.place(1, a_generate_request(seed=4, max_tokens=50))
        assert (await gateway.end_of(1)).token_ids == answer_of(tokens(300, 4), 50)
        await worker.until_idle()
        assert worker.engine.aborted_requests == 15
        deaf.cancel()
        await channel.close()


# One request by a call of its own


async def generate(worker: Worker, request: decode_pb2.GenerateRequest) -> list[decode_pb2.GenerateReply]:
    channel = connect(worker.address)
    try:
        return [reply async for reply in decode_pb2_grpc.DecodeStub(channel).Generate(request, timeout=DEADLINE_S)]
    except grpc.aio.AioRpcError as error:
        raise to_shoal_error(error) from error
    finally:
        await channel.close()


async def test_generate_answers_as_serve(nats: NatsRunning) -> None:
    async with working(nats) as worker:
        request = a_generate_request(max_tokens=12)
        request.sampling.logprobs = 0
        replies = await generate(worker, request)
        assert replies[0].started.hit_tokens == 0
        assert [t for reply in replies for t in unpack_u32(reply.token_ids)] == answer_of(tokens(300), 12)
        assert sum(len(reply.logprobs) for reply in replies) == 12
        assert replies[-1].finished.reason == common_pb2.LENGTH
        assert replies[-1].finished.completion_tokens == 12


async def test_cancelled_generate_call_aborts_once(nats: NatsRunning) -> None:
    async with working(nats) as worker:
        channel = connect(worker.address)
        call = decode_pb2_grpc.DecodeStub(channel).Generate(a_generate_request(max_tokens=3000))
        await call.read()
        call.cancel()
        await worker.until_idle()
        assert worker.engine.aborted_requests == 1
        await channel.close()


async def test_refusals_and_failures_of_generate_are_typed_errors(nats: NatsRunning) -> None:
    before = metrics.CATALOGUE.value("placements_total", verdict="other_pool")
    async with working(nats) as worker:
        with pytest.raises(ShoalError) as refused:
            await generate(worker, a_generate_request(pool="another"))
        assert refused.value.code == common_pb2.POOL_MISMATCH
        short = a_generate_request(max_tokens=3000)
        short.budget_ms = 30
        with pytest.raises(ShoalError) as spent:
            await generate(worker, short)
        assert spent.value.code == common_pb2.DEADLINE_EXCEEDED
        worker.service.leave()
        with pytest.raises(Refused) as leaving:
            await generate(worker, a_generate_request())
        assert leaving.value.code == common_pb2.DRAINING
    assert metrics.CATALOGUE.value("placements_total", verdict="other_pool") == before + 1


async def test_prefill_elsewhere_then_decode_here_equals_one_engine(nats: NatsRunning) -> None:
    async with working(nats) as worker, gateway_at(worker) as gateway:
        prompt = tokens(700, 3)
        done = await worker.engine.prefill(EngineRequest("job", prompt))
        assert done.first_token is not None
        request = a_generate_request(700, seed=3, max_tokens=10)
        request.resumed_token_ids = pack_u32([done.first_token])
        gateway.place(1, request)
        told = await gateway.end_of(1)
        assert [done.first_token, *told.token_ids] == answer_of(prompt, 10)
        assert told.hit_tokens == 640
