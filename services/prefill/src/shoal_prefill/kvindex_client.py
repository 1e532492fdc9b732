"""Asks kvindex whether a block is stored yet.

Any ready index will do; the same one is asked while it is there. After a change the old connection is closed in
the background, since other jobs may wait for their answers on it. When none answers, the caller goes on without
knowing: the first failure and the recovery are logged once, each failure is counted.
docs/decisions/0004-the-handoff-waits-briefly.md
"""

from collections.abc import Callable, Coroutine
from typing import Any, Literal

import grpc.aio

from shoal_contracts.errors import ShoalError, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import fleet_pb2, kvindex_pb2, kvindex_pb2_grpc
from shoal_prefill.metrics import INDEX_FAILURES
from shoal_prefill.prefill_job import PrefillJob
from shoal_runtime.grpc import call, connect
from shoal_runtime.logs import get_logger
from shoal_runtime.presence import Fleet

log = get_logger(__name__)

HandoffLevel = Literal["any", "l1", "l2"]

_LEVELS: dict[HandoffLevel, pb.Level.ValueType] = {"any": pb.LEVEL_UNSPECIFIED, "l1": pb.L1, "l2": pb.L2}
ANSWER_S = 0.05  # for the way there and back, beyond the wait itself
CLOSE_S = 10.0  # as long as a job may wait at most


class KvIndexClient:
    """A ``prefill_job.StoredBlocks`` over gRPC; closed by the process's exit stack."""

    def __init__(self, fleet: Fleet, level: HandoffLevel, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._fleet = fleet
        self._spawn = spawn
        self._level = _LEVELS[level]
        self._address = ""
        self._channel: grpc.aio.Channel | None = None
        self._is_failing = False

    async def is_stored(self, job: PrefillJob, block_hash: bytes, wait_s: float) -> bool:
        request = kvindex_pb2.AwaitRequest(
            pool=job.pool, cache_salt=job.request.cache_salt, block_hash=block_hash, level=self._level
        )
        try:
            reply = await call(self._stub().Await, request, timeout_s=wait_s + ANSWER_S)
        except ShoalError as error:
            self._fail(pb.ErrorCode.Name(error.code))
            raise
        if self._is_failing:
            self._is_failing = False
            log.warning("handoff.index_recovered")
        return reply.is_stored

    def _fail(self, code: str) -> None:
        INDEX_FAILURES.labels(code).inc()
        if not self._is_failing:
            self._is_failing = True
            log.warning("handoff.index_lost", error=code)

    def _stub(self) -> "kvindex_pb2_grpc.KvIndexAsyncStub":
        addresses = [
            member.address
            for member in self._fleet.live(fleet_pb2.KVINDEX)
            if member.is_ready and not member.is_draining
        ]
        if not addresses:
            raise Unavailable(pb.UNAVAILABLE, "no kvindex instance is ready")
        if self._channel is None or self._address not in addresses:
            left, self._address, self._channel = self._channel, addresses[0], connect(addresses[0])
            if left is not None:
                self._spawn(left.close(CLOSE_S))
        return kvindex_pb2_grpc.KvIndexStub(self._channel)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
