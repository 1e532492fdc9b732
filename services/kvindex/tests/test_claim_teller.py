"""Claims go to the log in the background, within a bound."""

import asyncio

from shoal_kvindex.claim_teller import MAX_UNDER_WAY, ClaimTeller
from shoal_kvindex.ingest.changes import Change, PendingBlocks
from shoal_kvindex.ingest.reports import Summary
from shoal_kvindex.metrics import CATALOGUE
from shoal_kvindex.names import Namespace
from shoal_runtime.health import Health
from shoal_runtime.tasks import Tasks
from shoal_testkit import settle

CLAIM = PendingBlocks(Namespace("pool", ""), [bytes(32)], "r", 1.0)
END = PendingBlocks(Namespace("pool", ""), (), "r", 0.0)


class SlowLog:
    """Takes what it is given, and says so when it is told to."""

    def __init__(self) -> None:
        self.taken: list[Change] = []
        self.goes_on = asyncio.Event()

    async def publish(self, change: Change) -> Summary | None:
        self.taken.append(change)
        await self.goes_on.wait()
        return None


async def test_order_is_kept_and_nobody_waits() -> None:
    log, tasks = SlowLog(), Tasks(Health())
    teller = ClaimTeller(tasks, log)
    teller.tell(CLAIM)
    teller.tell(END)
    assert log.taken == []
    await settle()
    assert log.taken == [CLAIM, END]
    await tasks.close()


async def test_what_a_slow_log_does_not_take_is_dropped_and_counted() -> None:
    log, tasks = SlowLog(), Tasks(Health())
    teller, dropped = ClaimTeller(tasks, log), CATALOGUE.value("untold_claims_total")
    for _ in range(MAX_UNDER_WAY + 2):
        teller.tell(CLAIM)
    assert CATALOGUE.value("untold_claims_total") == dropped + 2
    log.goes_on.set()
    await settle()
    teller.tell(CLAIM)
    await settle()
    assert len(log.taken) == MAX_UNDER_WAY + 1
    await tasks.close()


async def test_instance_that_leaves_tells_nothing_more() -> None:
    log, tasks = SlowLog(), Tasks(Health())
    await tasks.close()
    ClaimTeller(tasks, log).tell(CLAIM)
    assert log.taken == []
