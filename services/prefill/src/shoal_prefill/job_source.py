"""The JetStream side of a worker: protobuf jobs in, answers out. Protobuf stops here.

A job that makes no sense is answered with a failure and terminated; it never reaches the domain. Answers go to the
gateway's own subject on core NATS. docs/decisions/0003-prefill-is-pulled.md
"""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager

from shoal_contracts import subjects
from shoal_contracts.errors import BadRequest, ShoalError, to_failure
from shoal_contracts.ids import unpack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import prefill_pb2
from shoal_engine.api import EngineRequest
from shoal_engine.wire import to_items, to_sampling
from shoal_prefill.prefill_job import Answer, PrefillJob, Stored
from shoal_runtime import queues, tracing
from shoal_runtime.logs import get_logger
from shoal_runtime.nats import NatsConnection
from shoal_runtime.queues import JobQueue

log = get_logger(__name__)

WAIT_S = 1.0
WAIT_EACH_S = 0.05  # with several queues: long enough to cost little, short enough to make none wait

_STORED = {
    Stored.YES: prefill_pb2.STORED_YES,
    Stored.UNKNOWN: prefill_pb2.STORED_UNKNOWN,
    Stored.NONE: prefill_pb2.STORED_NONE,
}


def to_job(message: prefill_pb2.PrefillJob) -> PrefillJob:
    """BadRequest when the message cannot be a job."""
    try:
        token_ids = unpack_u32(message.token_ids)
    except ValueError as error:
        raise BadRequest(pb.INVALID_REQUEST, "token_ids must be a multiple of 4 bytes", param="token_ids") from error
    if not token_ids:
        raise BadRequest(pb.INVALID_REQUEST, "the prompt is empty", param="token_ids")
    request = EngineRequest(
        request_id=message.request_id,
        token_ids=token_ids,
        sampling=to_sampling(message.sampling),
        cache_salt=message.cache_salt,
        items=to_items(message.items),
    )
    caller = subjects.answering_gateway(message.answer_subject)
    return PrefillJob(
        pool=message.pool,
        request=request,
        packed_token_ids=message.token_ids,
        budget_s=message.budget_ms / 1000,
        caller=caller,
        expected_hit_tokens=message.expected_hit_tokens if message.HasField("expected_hit_tokens") else None,
        dram_store_ids=tuple(message.dram_store_ids),
    )


def to_answer(request_id: str, instance_id: str, delivery: int, answer: Answer) -> prefill_pb2.PrefillAnswer:
    """The message that tells ``answer``."""
    message = prefill_pb2.PrefillAnswer(request_id=request_id, instance_id=instance_id, delivery=delivery)
    if isinstance(answer, ShoalError):
        message.failure.CopyFrom(to_failure(answer))
        return message
    done = message.done
    done.hit_tokens = answer.hit_tokens
    done.miss_tokens = answer.miss_tokens
    done.stored = _STORED[answer.stored]
    if answer.first_token is not None:
        done.first_token = answer.first_token
    done.compute_ms = answer.compute_ms
    done.store_wait_ms = answer.store_wait_ms
    done.prefetched_blocks = answer.prefetched_blocks
    done.prefetch_ms = answer.prefetch_ms
    return message


class JetStreamDelivery:
    """A ``prefill_job.Delivery`` on a queue's delivery."""

    def __init__(
        self,
        job: PrefillJob,
        delivery: queues.Delivery[prefill_pb2.PrefillJob],
        nats: NatsConnection,
        instance_id: str,
    ) -> None:
        self.job = job
        self.number = delivery.number
        self._delivery = delivery
        self._nats = nats
        self._instance_id = instance_id

    def span(self) -> AbstractContextManager[object]:
        return tracing.start_span("prefill.Job", self._delivery.trace, prompt_tokens=len(self.job.request.token_ids))

    async def answer(self, answer: Answer) -> bool:
        return await _publish_answer(self._nats, self._instance_id, self._delivery, answer)

    async def claim(self) -> None:
        await self._delivery.in_progress()

    async def ack(self) -> None:
        await self._delivery.ack()

    async def give_back(self) -> None:
        await self._delivery.nak()

    async def terminate(self) -> None:
        await self._delivery.term()


class JetStreamJobSource:
    """An ``intake.JobSource`` on one queue per tier, asked in turn. Not to be called twice at once."""

    def __init__(
        self, nats: NatsConnection, tier_queues: Sequence[JobQueue[prefill_pb2.PrefillJob]], instance_id: str
    ) -> None:
        self._nats = nats
        self._instance_id = instance_id
        self._turns = itertools.cycle(tier_queues)
        self._wait_s = WAIT_S if len(tier_queues) == 1 else WAIT_EACH_S

    async def take(self) -> JetStreamDelivery | None:
        delivery = await next(self._turns).pull(wait_s=self._wait_s)
        if delivery is None:
            return None
        try:
            job = to_job(delivery.job)
        except BadRequest as refusal:
            log.warning("job.refused", request_id=delivery.job.request_id, reason=refusal.message)
            await _publish_answer(self._nats, self._instance_id, delivery, refusal)
            await delivery.term()
            return None
        return JetStreamDelivery(job, delivery, self._nats, self._instance_id)


async def _publish_answer(
    nats: NatsConnection, instance_id: str, delivery: queues.Delivery[prefill_pb2.PrefillJob], answer: Answer
) -> bool:
    message = to_answer(delivery.job.request_id, instance_id, delivery.number, answer)
    try:
        await nats.publish(delivery.job.answer_subject, message)
    except ShoalError as error:
        log.warning("job.answer_lost", request_id=delivery.job.request_id, error=pb.ErrorCode.Name(error.code))
        return False
    return True
