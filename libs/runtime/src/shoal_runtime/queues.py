"""Work queues on JetStream: each job goes to one worker, and to another one when that worker falls silent.

A queue is a stream in memory with work-queue retention and one shared pull consumer. It is bounded: when full, a
publish is refused instead of pushing old jobs out. Jobs expire in the queue by the server's clock. The consumer has
no delivery limit of its own, because a message past ``max_deliver`` stays in a work queue for ever: the worker looks
at ``Delivery.number`` and terminates. A restarted NATS has forgotten all of it, so every user ensures it again after
a reconnect. docs/decisions/0003-prefill-is-pulled.md
"""

import asyncio
import math
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, Generic, TypeVar

import nats.errors
import nats.js.errors
from google.protobuf.message import DecodeError, Message
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from opentelemetry.context import Context

from shoal_contracts import subjects
from shoal_contracts.errors import Refused
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import prefill_pb2
from shoal_runtime import tracing
from shoal_runtime.logs import get_logger
from shoal_runtime.nats import NatsConnection, cut_off

log = get_logger(__name__)

ACK_WAIT_S = 3.0
IN_PROGRESS_EACH_S = 1.0
MAX_JOBS = 10_000  # a queue; bytes are bounded by the server (max_memory_store), which reserves what a stream names
DUPLICATE_WINDOW_S = 120.0
REQUEST_S = 5.0
CONSUMER = "workers"

_FULL_ERRORS = (10077, 10023, 10028, 10047)  # the stream's bound, or the server's memory, is reached
_IN_USE_ERROR = 10058  # the stream exists with another configuration

Job = TypeVar("Job", bound=Message)


class JobQueue(Generic[Job]):
    """One stream, both ends: the gateway publishes and deletes, workers pull."""

    def __init__(self, nats: NatsConnection, *, stream: str, subject: str, job_type: type[Job]) -> None:
        self._nats = nats
        self._stream = stream
        self._subject = subject
        self._job_type = job_type
        self._puller: JetStreamContext.PullSubscription | None = None
        self._created: datetime | None = None  # tells a stream from its namesake after a restart of NATS

    async def ensure(self) -> None:
        """Create stream and consumer when they are not there. Idempotent; Unavailable when JetStream is not."""
        stream = api.StreamConfig(
            name=self._stream,
            subjects=[self._subject],
            retention=api.RetentionPolicy.WORK_QUEUE,
            storage=api.StorageType.MEMORY,
            discard=api.DiscardPolicy.NEW,
            max_msgs=MAX_JOBS,
            duplicate_window=DUPLICATE_WINDOW_S,
            allow_msg_ttl=True,
        )
        consumer = api.ConsumerConfig(
            durable_name=CONSUMER,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_deliver=-1,
            max_ack_pending=MAX_JOBS,
        )
        try:
            async with asyncio.timeout(REQUEST_S):
                self._created = (await self._add_stream(stream)).created
                await self._nats.jetstream.add_consumer(self._stream, consumer)
        except (TimeoutError, nats.errors.Error) as error:
            raise cut_off() from error

    async def _add_stream(self, stream: api.StreamConfig) -> api.StreamInfo:
        try:
            return await self._nats.jetstream.add_stream(stream)
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _IN_USE_ERROR:
                raise
            return await self._nats.jetstream.update_stream(stream)

    async def publish(self, job: Job, *, job_id: str, attempt: int, expires_s: float) -> int:
        """Queue ``job``; returns its sequence number, for ``delete``. While the queue has it, a job is queued once.

        Refused (OVERLOADED) when the queue is full, Unavailable when NATS is away.
        """
        message_id = f"{job_id}.{attempt}"
        ack = await self._send(job, message_id, expires_s)
        while ack.duplicate and not await self._has(ack.seq):
            # It was settled, and who publishes it again did not hear the answer: JetStream alone would drop it.
            ack = await self._send(job, f"{message_id}.{ack.seq}", expires_s)
        return int(ack.seq)

    async def _send(self, job: Job, message_id: str, expires_s: float) -> api.PubAck:
        payload = self._nats.encode(job)
        # JetStream counts whole seconds: round up, because a job that expires early is lost work.
        headers = {"Nats-Msg-Id": message_id, "Nats-TTL": f"{max(1, math.ceil(expires_s))}s"}
        try:
            return await self._nats.jetstream.publish(
                self._subject, payload, timeout=REQUEST_S, stream=self._stream, headers=self._nats.headers(headers)
            )
        except nats.js.errors.APIError as error:
            if error.err_code in _FULL_ERRORS:
                raise Refused(pb.OVERLOADED, "the prefill queue is full; try again", retry_after_s=1) from error
            raise cut_off() from error
        except (TimeoutError, nats.errors.Error) as error:
            raise cut_off() from error

    async def _has(self, sequence: int) -> bool:
        """Whether the job is queued, or taken and not settled."""
        try:
            async with asyncio.timeout(REQUEST_S):
                await self._nats.jetstream.get_msg(self._stream, sequence)
        except nats.js.errors.NotFoundError:
            return False
        except (TimeoutError, nats.errors.Error) as error:
            raise cut_off() from error
        return True

    async def delete(self, sequence: int) -> bool:
        """Take a queued job out; False when it is not there any more (taken and settled, expired, or NATS away)."""
        try:
            return bool(await self._nats.jetstream.delete_msg(self._stream, sequence))
        except (TimeoutError, nats.errors.Error):
            return False

    async def pull(self, *, wait_s: float) -> "Delivery[Job] | None":
        """The next job, or None when none came within ``wait_s``. Unavailable when NATS or the queue is away.

        Not to be called twice at once. A job that does not parse is terminated here and counts as none.
        """
        if not self._nats.is_connected:
            raise cut_off()
        try:
            if self._puller is None:
                self._puller = await self._nats.jetstream.pull_subscribe_bind(CONSUMER, self._stream)
            [message] = await self._puller.fetch(1, timeout=wait_s)
        except TimeoutError:
            return None
        except nats.errors.Error as error:
            raise cut_off() from error
        try:
            job = self._job_type.FromString(message.data)
        except DecodeError:
            log.error("queue.job_dropped", subject=message.subject, reason="does not parse")
            await message.term()
            return None
        created = self._created
        return Delivery(job, message, lambda: self._nats.is_connected and self._created == created)


class Delivery(Generic[Job]):
    """One job handed to one worker; ends with exactly one of ``ack``, ``nak``, ``term``, or with silence.

    Nothing is sent while NATS is away or once its stream is another one: sequence numbers start again after a restart,
    and an old acknowledgement would settle somebody else's job. Then the job comes again or was forgotten.
    """

    def __init__(self, job: Job, message: Msg, is_current: Callable[[], bool]) -> None:
        self.job = job
        self.number = int(message.metadata.num_delivered or 1)  # 1: first delivery
        self._message = message
        self._is_current = is_current

    @property
    def trace(self) -> Context:
        """The trace of the gateway that published the job."""
        return tracing.extract(self._message.headers or {})

    async def in_progress(self) -> None:
        """Ask for another ``ACK_WAIT_S``; to be called each ``IN_PROGRESS_EACH_S`` while working."""
        await self._settle(self._message.in_progress)

    async def ack(self) -> None:
        """Done: the job leaves the queue."""
        await self._settle(self._message.ack)

    async def nak(self) -> None:
        """Give the job to another worker now."""
        await self._settle(self._message.nak)

    async def term(self) -> None:
        """The job leaves the queue although it was not done."""
        await self._settle(self._message.term)

    async def _settle(self, send: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if not self._is_current():
            log.debug("queue.settle_dropped", reason="its stream is away")
            return
        try:
            await send()
        except nats.errors.Error as error:
            log.warning("queue.settle_failed", error=type(error).__name__)


async def ensure_prefill_queue(nats: NatsConnection, pool: str, tier: str) -> JobQueue[prefill_pb2.PrefillJob]:
    """The queue of one pool and tier, created now and again after each reconnect."""
    queue = JobQueue(
        nats,
        stream=subjects.prefill_stream(pool, tier),
        subject=subjects.prefill_job(pool, tier),
        job_type=prefill_pb2.PrefillJob,
    )
    await queue.ensure()
    nats.on_reconnect(queue.ensure)
    return queue
