"""Takes claims of prefixes, and their ends, to the other instances in the background: no Match waits for the log.

They begin in their order and so end up in it. Beyond a bound they are dropped and counted; an end that got lost is
made good by the claim's own time.
"""

from shoal_contracts.errors import Refused
from shoal_kvindex.ingest.changes import ChangeLog, PendingBlocks
from shoal_kvindex.metrics import UNTOLD_CLAIMS
from shoal_runtime.tasks import Tasks

MAX_UNDER_WAY = 1_000  # a log that is slow for a second, at two hundred claims a second and five-fold


class ClaimTeller:
    """On the loop that answers requests."""

    def __init__(self, tasks: Tasks, log: ChangeLog) -> None:
        self._tasks = tasks
        self._log = log
        self._under_way = 0

    def tell(self, change: PendingBlocks) -> None:
        """Does not wait."""
        if self._under_way >= MAX_UNDER_WAY:
            UNTOLD_CLAIMS.inc()
            return
        self._under_way += 1
        try:
            self._tasks.spawn(self._publish(change), name="publish_claim")
        except Refused:  # this instance leaves
            self._under_way -= 1

    async def _publish(self, change: PendingBlocks) -> None:
        try:
            await self._log.publish(change)
        finally:
            self._under_way -= 1
