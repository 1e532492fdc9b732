"""The index in memory, put together as the service does it, with a journal that only remembers."""

import pytest

from shoal_kvindex.ingest.applier import Applier
from shoal_kvindex.ingest.changes import Change
from shoal_kvindex.ingest.reports import Summary
from shoal_kvindex.service import Domain, assemble
from shoal_kvindex.settings import KvIndexSettings
from shoal_kvindex.store.pending import PendingChanges
from shoal_testkit.clock import VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def journal() -> PendingChanges:
    return PendingChanges(10_000)


@pytest.fixture
def domain(journal: PendingChanges, clock: VirtualClock) -> Domain:
    return assemble(KvIndexSettings(max_waiters=2, max_claims=3), journal, clock)


class LocalLog:
    """A ChangeLog of one instance: what is published is applied at once, and remembered."""

    def __init__(self, applier: Applier) -> None:
        self._applier = applier
        self.published: list[Change] = []

    async def publish(self, change: Change) -> Summary | None:
        self.published.append(change)
        return self._applier.apply(change)


@pytest.fixture
def change_log(domain: Domain) -> LocalLog:
    return LocalLog(domain.applier)
