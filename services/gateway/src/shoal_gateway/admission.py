"""How many requests this gateway runs at once, who waits, and who is refused.

Waiting ones are admitted in the order they came. A slot belongs to exactly one request; one that was handed to a
request which has just given up is passed on. Refusals carry Retry-After.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from shoal_contracts.errors import Refused
from shoal_contracts.v1 import common_pb2 as pb
from shoal_policy import AdmissionPolicy, AdmissionVerdict, AdmissionView

RETRY_AFTER_S = 2.0


class AdmissionGate:
    """Used on one event loop."""

    def __init__(self, policy: AdmissionPolicy, wait_s: float) -> None:
        self._policy = policy
        self._wait_s = wait_s
        self._running_requests = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def view(self) -> AdmissionView:
        return AdmissionView(self._running_requests, len(self._waiting))

    @contextlib.asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Hold a slot for the block. Refused (OVERLOADED) when there is none in time."""
        await self._enter()
        try:
            yield
        finally:
            self._leave()

    async def _enter(self) -> None:
        verdict = self._policy.decide(self.view)
        if verdict is AdmissionVerdict.ADMIT:
            self._take()
        elif verdict is AdmissionVerdict.REFUSE:
            raise _overloaded()
        else:
            await self._wait_turn()

    async def _wait_turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()  # the slot came while this request was giving up
            if isinstance(error, TimeoutError):
                raise _overloaded() from None
            raise

    def _take(self) -> None:
        self._running_requests += 1

    def _leave(self) -> None:
        self._running_requests -= 1
        while self._waiting and self._running_requests < self._policy.max_running_requests:
            turn = self._waiting.popleft()
            if not turn.done():
                self._take()
                turn.set_result(None)


def _overloaded() -> Refused:
    return Refused(
        pb.OVERLOADED, "too many requests are running here; try again in a moment", retry_after_s=RETRY_AFTER_S
    )
