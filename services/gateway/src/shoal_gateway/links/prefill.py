"""The prefill workers behind their queues: publish a job, hear its answer on this gateway's own subject.

An answer is for a request, not for an attempt: the first one counts. A job that is not answered is published again
after NATS came back, under the same job id, so that a queue which still has it keeps one. A publish is never left
half done: who gives up waiting for its acknowledgement has the job taken out when that comes. While neither NATS nor a
worker is there an attempt is given up early, because decode can compute the prompt.
docs/decisions/0003-prefill-is-pulled.md
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial

from shoal_contracts import subjects
from shoal_contracts.errors import Bug, Refused, ShoalError, Unavailable, from_failure
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import fleet_pb2, prefill_pb2
from shoal_gateway.links.peers import spawn_if_open, usable
from shoal_gateway.links.wire import to_prefill_done, to_prefill_job
from shoal_gateway.metrics import PREFILL_CANCELS
from shoal_gateway.ports import Fallback
from shoal_gateway.request import PrefillDone, PrefillWork
from shoal_runtime.logs import get_logger
from shoal_runtime.nats import NatsConnection
from shoal_runtime.presence import Fleet
from shoal_runtime.process import Process
from shoal_runtime.queues import JobQueue, ensure_prefill_queue

log = get_logger(__name__)

CHECK_EACH_S = 0.5
AWAY_S = 8.0  # a worker that restarts without a model to load is back by then

_Queue = JobQueue[prefill_pb2.PrefillJob]
_Answer = asyncio.Future[PrefillDone]


@dataclass(slots=True)
class _Pending:
    """A request with jobs out."""

    pool: str
    answer: _Answer
    job: prefill_pb2.PrefillJob
    queue: _Queue | None = None
    attempt: int = 0
    expires_s: float = 0.0
    sequences: list[int] = field(default_factory=list)


class PrefillLink:
    """See ``ports.PrefillQueue``."""

    def __init__(self, process: Process, nats: NatsConnection, fleet: Fleet) -> None:
        self._process = process
        self._nats = nats
        self._fleet = fleet
        self._answer_subject = subjects.prefill_answer(process.instance_id)
        self._pending: dict[str, _Pending] = {}
        self._queues: dict[tuple[str, str], _Queue] = {}
        self._making = asyncio.Lock()
        self._publishing: set[asyncio.Task[int]] = set()  # each ends with its round trip to NATS

    async def start(self) -> None:
        await self._nats.subscribe(self._answer_subject, prefill_pb2.PrefillAnswer, self._on_answer)
        self._nats.on_reconnect(self._publish_again)

    def find_fallback(self, pool: str, tier: str) -> Fallback | None:
        if not self._nats.is_connected:
            return Fallback.NATS_AWAY
        for member in usable(self._fleet, fleet_pb2.PREFILL):
            if member.model is not None and member.model.pool == pool and tier in member.model.tiers:
                return None
        return Fallback.NO_PREFILL_WORKER

    async def compute(self, work: PrefillWork, timeout_s: float) -> PrefillDone:
        answer: _Answer = asyncio.get_running_loop().create_future()
        job = to_prefill_job(work, self._answer_subject)
        pending = self._pending.get(work.request_id)
        if pending is None:
            pending = self._pending[work.request_id] = _Pending(work.pool, answer, job)
        pending.answer, pending.job, pending.attempt, pending.expires_s = answer, job, work.attempt, work.budget_s
        try:
            async with asyncio.timeout(timeout_s):
                pending.queue = await self._queue(work.pool, work.tier)
                await self._publish(pending)
                done = await self._wait(work, answer)
        except TimeoutError:
            raise Unavailable(pb.PEER_SILENT, "no prefill worker answered in time; try again") from None
        del self._pending[work.request_id]
        if len(pending.sequences) > 1:
            self._withdraw(work.request_id, pending)
        return done

    def cancel(self, request_id: str, pool: str) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            PREFILL_CANCELS.inc()
            self._withdraw(request_id, pending)

    async def _wait(self, work: PrefillWork, answer: _Answer) -> PrefillDone:
        away_s = 0.0
        while not answer.done():
            await asyncio.wait({answer}, timeout=CHECK_EACH_S)
            away_s = 0.0 if self.find_fallback(work.pool, work.tier) is None else away_s + CHECK_EACH_S
            if away_s >= AWAY_S and not answer.done():
                raise Unavailable(pb.UNAVAILABLE, "no prefill worker is there; try again")
        return answer.result()

    def _withdraw(self, request_id: str, pending: _Pending) -> None:
        spawn_if_open(self._process, self._take_back(request_id, pending), "prefill_cancel")

    async def _take_back(self, request_id: str, pending: _Pending) -> None:
        """The queued jobs first: a worker that aborted one must not find the next."""
        try:
            if pending.queue is not None:
                for sequence in pending.sequences:
                    await pending.queue.delete(sequence)
            cancel = prefill_pb2.PrefillCancel(request_id=request_id)
            await self._nats.publish(subjects.prefill_cancel(pending.pool), cancel)
        except ShoalError as error:  # NATS is away: the job ends with its budget
            log.warning("prefill.cancel_lost", request_id=request_id, error=pb.ErrorCode.Name(error.code))

    async def _queue(self, pool: str, tier: str) -> _Queue:
        async with self._making:
            if (pool, tier) not in self._queues:
                self._queues[pool, tier] = await ensure_prefill_queue(self._nats, pool, tier)
            return self._queues[pool, tier]

    async def _publish(self, pending: _Pending) -> None:
        assert pending.queue is not None
        work = pending.queue.publish(
            pending.job, job_id=pending.job.request_id, attempt=pending.attempt, expires_s=pending.expires_s
        )
        publishing = asyncio.get_running_loop().create_task(work, name="prefill_publish")
        self._publishing.add(publishing)
        publishing.add_done_callback(partial(self._on_published, pending))
        await asyncio.shield(publishing)

    def _on_published(self, pending: _Pending, publishing: "asyncio.Task[int]") -> None:
        """Before whoever waits goes on; also when nobody does any more: a job must not stay for nobody."""
        self._publishing.discard(publishing)
        if publishing.cancelled() or publishing.exception() is not None:
            return
        sequence = publishing.result()
        if self._pending.get(pending.job.request_id) is not pending:
            pending.sequences = [sequence]
            self._withdraw(pending.job.request_id, pending)  # once more: a worker may have it already
        elif sequence not in pending.sequences:
            pending.sequences.append(sequence)

    async def _publish_again(self) -> None:
        """After a reconnect; Unavailable lets the connection call it again. A job that is refused ends alone."""
        for queue in self._queues.values():
            await queue.ensure()
        for pending in list(self._pending.values()):
            if pending.queue is not None and not pending.answer.done():
                pending.sequences.clear()  # a NATS that was restarted numbers from one again
                await self._publish_or_tell(pending)

    async def _publish_or_tell(self, pending: _Pending) -> None:
        try:
            await self._publish(pending)
        except Refused as error:
            if not pending.answer.done():
                pending.answer.set_exception(error)

    def _on_answer(self, message: prefill_pb2.PrefillAnswer) -> None:
        pending = self._pending.get(message.request_id)
        if pending is None or pending.answer.done():
            return  # a later answer, or one to a request that is over
        outcome = message.WhichOneof("outcome")
        if outcome == "done":
            pending.answer.set_result(to_prefill_done(message))
        elif outcome == "failure":
            pending.answer.set_exception(from_failure(message.failure))
        else:
            pending.answer.set_exception(Bug(pb.BUG, "a prefill worker answered without an outcome"))
