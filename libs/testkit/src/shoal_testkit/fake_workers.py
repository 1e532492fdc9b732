"""Prefill and decode workers that do what a test says; see ``fakes``."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

from shoal_contracts import subjects
from shoal_contracts.errors import ShoalError, to_failure
from shoal_contracts.ids import pack_u32, unpack_u32
from shoal_contracts.v1 import common_pb2, decode_pb2, decode_pb2_grpc, fleet_pb2, prefill_pb2
from shoal_runtime.grpc import create_server, serve
from shoal_runtime.nats import connect
from shoal_runtime.presence import Load
from shoal_runtime.process import Process
from shoal_runtime.queues import Delivery, JobQueue, ensure_prefill_queue
from shoal_runtime.streams import TurnWriter, serve_stream
from shoal_testkit.fakes import ANSWER_TOKENS, BLOCK_TOKENS, FIRST_ANSWER_TOKEN, FakePeer, merged


@dataclass(slots=True)
class FakePrefill(FakePeer):
    """Answers each job after ``delay_s``: with the next of ``failures`` while there are any, else done."""

    name: str = "prefill"
    tier: str = "all"
    delay_s: float = 0.0
    hit_tokens: int = 0
    stored: prefill_pb2.Stored.ValueType = prefill_pb2.STORED_YES
    failures: list[ShoalError] = field(default_factory=list)
    is_silent: bool = False
    jobs: list[prefill_pb2.PrefillJob] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)

    async def start(self, process: Process) -> None:
        self.nats = await connect(process, process.settings.nats_url)
        queue = await ensure_prefill_queue(self.nats, self.pool, self.tier)
        subject = subjects.prefill_cancel(self.pool)
        await self.nats.subscribe(subject, prefill_pb2.PrefillCancel, lambda c: self.cancels.append(c.request_id))
        process.tasks.spawn(lambda: self._work(queue), name="fake_prefill")
        await self.announce(process, fleet_pb2.PREFILL, "")

    async def _work(self, queue: JobQueue[prefill_pb2.PrefillJob]) -> None:
        while True:
            try:
                delivery = await queue.pull(wait_s=1)
            except ShoalError:
                await asyncio.sleep(0.1)
                continue
            if delivery is not None:
                self.jobs.append(delivery.job)
                await self._answer(delivery)

    async def _answer(self, delivery: Delivery[prefill_pb2.PrefillJob]) -> None:
        job = delivery.job
        await asyncio.sleep(self.delay_s)
        await delivery.ack()
        if self.is_silent or job.request_id in self.cancels:
            return
        answer = prefill_pb2.PrefillAnswer(
            request_id=job.request_id, instance_id="fake-prefill", delivery=delivery.number
        )
        if self.failures:
            answer.failure.CopyFrom(to_failure(self.failures.pop(0)))
        else:
            answer.done.hit_tokens = self.hit_tokens
            answer.done.miss_tokens = len(job.token_ids) // 4 - self.hit_tokens
            answer.done.stored = self.stored
            answer.done.compute_ms = 1
        with contextlib.suppress(ShoalError):
            await self.nats.publish(job.answer_subject, answer)


@dataclass(slots=True)
class FakeDecode(FakePeer):
    """Counts up, one token each ``step_s``, to ``answer_tokens`` or to what the request allows.

    ``refusal``: what every placement is refused with. ``silent_after``: tokens after which nothing more comes.
    """

    name: str = "decode"
    answer_tokens: int = ANSWER_TOKENS
    step_s: float = 0.0
    hit_tokens: int | None = None  # None: all whole blocks of the prompt
    refusal: ShoalError | None = None
    is_mute: bool = False  # neither accepts nor refuses
    silent_after: int | None = None
    told_load: Load | None = None
    placements: list[decode_pb2.GenerateRequest] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def load(self) -> Load | None:
        return self.told_load

    async def start(self, process: Process) -> None:
        self.nats = await connect(process, process.settings.nats_url)
        self.server = create_server(process)
        decode_pb2_grpc.add_DecodeServicer_to_server(_DecodeApi(self), self.server)  # type: ignore[abstract]  # so does Generate
        await self.announce(process, fleet_pb2.DECODE, await serve(process, self.server))


class _DecodeApi(decode_pb2_grpc.DecodeServicer):
    def __init__(self, fake: FakeDecode) -> None:
        self._fake = fake

    async def Serve(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        writer: TurnWriter[decode_pb2.ServeReply] = TurnWriter(merged)
        mine: dict[int, asyncio.Task[None]] = {}

        def on_request(request: decode_pb2.ServeRequest) -> None:
            for place in request.place:
                self._fake.placements.append(place.request)
                task = asyncio.get_running_loop().create_task(self._run(place, writer))
                mine[place.stream_id] = self._fake.running[place.stream_id] = task
            for stream_id in unpack_u32(request.cancel):
                self._fake.cancels.append(stream_id)
                if stream_id in mine and mine[stream_id].cancel():
                    writer.put(_finished(stream_id, common_pb2.CANCEL, 0))

        try:
            await serve_stream(request_iterator, context, writer, on_request)
        finally:
            for task in mine.values():
                task.cancel()

    async def _run(self, place: decode_pb2.Place, writer: TurnWriter[decode_pb2.ServeReply]) -> None:
        fake, request, stream_id = self._fake, place.request, place.stream_id
        if fake.is_mute:
            return
        reply = decode_pb2.ServeReply()
        if fake.refusal is not None:
            reply.refused.add(stream_id=stream_id, failure=to_failure(fake.refusal))
            writer.put(reply)
            return
        prompt_tokens = len(request.token_ids) // 4
        hit_tokens = prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS if fake.hit_tokens is None else fake.hit_tokens
        reply.accepted.add(stream_id=stream_id)
        reply.started.add(stream_id=stream_id, hit_tokens=hit_tokens)
        writer.put(reply)
        asked = request.sampling.max_tokens if request.sampling.HasField("max_tokens") else fake.answer_tokens
        count = min(asked, fake.answer_tokens)
        for number in range(len(request.resumed_token_ids) // 4, count):
            if number == fake.silent_after:
                await asyncio.Event().wait()
            await asyncio.sleep(fake.step_s)
            writer.put(_token(stream_id, FIRST_ANSWER_TOKEN + number, request.sampling))
        reason = common_pb2.LENGTH if count == asked else common_pb2.STOP
        writer.put(_finished(stream_id, reason, count))


def _token(stream_id: int, token: int, sampling: common_pb2.Sampling) -> decode_pb2.ServeReply:
    reply = decode_pb2.ServeReply(stream_ids=pack_u32([stream_id]), counts=pack_u32([1]), token_ids=pack_u32([token]))
    if sampling.HasField("logprobs"):
        reply.logprobs.add(stream_id=stream_id).tokens.add(logprob=-0.5)
    return reply


def _finished(stream_id: int, reason: common_pb2.FinishReason.ValueType, count: int) -> decode_pb2.ServeReply:
    reply = decode_pb2.ServeReply()
    reply.finished.add(stream_id=stream_id, reason=reason, completion_tokens=count)
    return reply
