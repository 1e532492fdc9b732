"""The log between the instances of kvindex, as one of them keeps it: publish, apply in order, survive its absence.

While the log is there, a change is published and applied when it comes back: every instance applies the same order.
When the log is away (NATS is, or does not answer within ``ACK_S``), what was published and did not come back is
applied here at once, as is everything later, and waits within a bound to be published; the log's order decides again
once it comes back, so that all maps come to the same for what several servers tell of, the shared level. A restarted
NATS has a new log: then what was published within the last seconds is published again, because another instance may
have missed it. Each change has an id, so none is applied twice by accident.

What an instance missed for good (its log or its bound was overrun) shows as gaps of the reports; gaps that only this
instance may have seen are told to all, because all must drop the same copies.
docs/decisions/0008-kvindex-scales.md
"""

import asyncio
import enum
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, islice
from typing import NamedTuple, Protocol

from shoal_contracts.errors import Unavailable
from shoal_kvindex.ingest.applier import Applier, History
from shoal_kvindex.ingest.changes import Change, PendingBlocks, Reports, Sign, StoreSign
from shoal_kvindex.ingest.instances import StoreInstances
from shoal_kvindex.ingest.reports import Fence, Summary
from shoal_kvindex.ingest.split import split, weight
from shoal_runtime.clock import Clock
from shoal_runtime.logs import get_logger

log = get_logger(__name__)

ACK_S = 1.0
BACK_S = 0.5  # then to come back; a server of LMCache's waits 2 s for its answer
CATCH_UP_S = 5.0  # without a change coming in
RETRY_S = 0.5
RETAINED_S = 10.0  # others come back after an outage within this time, or have missed something
MAX_RETAINED = 100_000  # blocks and objects
MAX_SEEN = 50_000
DRAINED_AT_ONCE = 64
DRAINED_WEIGHT = 5_000


class LogPosition(NamedTuple):
    """A place in the log. ``log_id`` tells a log from the one before a restart of NATS."""

    log_id: str
    seq: int


class Opened(NamedTuple):
    """The log as it was found: the numbers of its first and last change (last < first: it has none)."""

    log_id: str
    first_seq: int
    last_seq: int


class Logged(NamedTuple):
    """What the log brings. ``read`` parses it, None when this version does not know it."""

    change_id: str
    seq: int
    age_s: float  # how long it was in the log when it was opened; 0 for what came later
    read: Callable[[], Change | None]


class LogLink(Protocol):
    """The edge to the log. Everything may raise Unavailable."""

    async def open(self) -> Opened:
        """Make the log when it is not there, and look at it."""

    async def follow(self, after_seq: int, hear: Callable[[Logged], None], lost: Callable[[str], None]) -> None:
        """Call ``hear`` for every change after this one, in order and without a gap, until ``lost`` is called with
        the reason; then no more. Ends an earlier call's following."""

    async def append(self, change_id: str, change: Change) -> None:
        """Returns when the log has it. Calls that begin one after the other end up in this order."""


class Fate(enum.Enum):
    """What became of a change that was published here."""

    LOGGED = "logged"
    APPLIED_HERE = "applied_here"  # the log is away: it waits to be published
    DROPPED = "dropped"  # applied here, and no room to wait


@dataclass(slots=True, eq=False)
class _Entry:
    change_id: str
    change: Change
    at_s: float = 0.0
    is_back: bool = False
    summary: Summary | None = None
    applied: asyncio.Event = field(default_factory=asyncio.Event)

    def settle(self, summary: Summary) -> None:
        self.summary = summary
        self.applied.set()


class SharedLog:
    """A ChangeLog; on the loop that answers requests. ``run`` is a task of the process."""

    def __init__(
        self, link: LogLink, applier: Applier, instances: StoreInstances, clock: Clock, name: str, max_waiting: int
    ) -> None:
        """``name`` is this life of this instance: no other may have it."""
        self._link = link
        self._applier = applier
        self._instances = instances
        self._clock = clock
        self._ids = (f"{name}.{number}" for number in count(1))
        self._max_waiting = max_waiting
        self._is_open = False
        self._wants_open = asyncio.Event()
        self._came = asyncio.Event()  # something was applied from the log
        self._has_looked = asyncio.Event()
        self._has_caught_up = asyncio.Event()
        self._durable: LogPosition | None = None
        self._position: LogPosition | None = None
        self._sent: OrderedDict[str, _Entry] = OrderedDict()  # published, not back
        self._here: OrderedDict[str, _Entry] = OrderedDict()  # applied here, not back
        self._waiting: deque[_Entry] = deque()  # to be published again
        self._waiting_weight = 0
        self._retained: deque[_Entry] = deque()
        self._retained_weight = 0
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._unsure: set[str] = set()  # servers whose DRAM copies others may see otherwise
        self._joined_at_s = 0.0
        self.fates: dict[Fate, int] = dict.fromkeys(Fate, 0)
        self.missed_changes = 0  # the log had dropped them before this instance came to them

    @property
    def is_open(self) -> bool:
        """Whether changes go to all instances now."""
        return self._is_open

    @property
    def waiting_weight(self) -> int:
        """Blocks and objects in changes that wait for the log."""
        return self._waiting_weight

    @property
    def position(self) -> LogPosition | None:
        """The last change applied from the log; None before the first look at it."""
        return self._position

    @property
    def settled_position(self) -> LogPosition | None:
        """Where the log stands when everything applied here is in it by now, and in the journal of whoever follows
        it; None while something is not, and a while after a new log began."""
        is_young = self._clock.monotonic() - self._joined_at_s < RETAINED_S
        return None if not self._is_open or self._here or is_young else self._position

    async def join(self, durable: LogPosition | None) -> bool:
        """Begin, with a directory that has all up to ``durable``. Returns when the log was applied as far as it went
        then (True), or cannot be read now: then it is joined when it comes."""
        self._durable = durable
        self._wants_open.set()
        await self._has_looked.wait()
        return self._has_caught_up.is_set()

    def _is_durable(self) -> bool:
        at, durable = self._position, self._durable
        return at is not None and durable is not None and at.log_id == durable.log_id and at.seq <= durable.seq

    async def publish(self, change: Change) -> Summary | None:
        summaries = [await self._publish(piece) for piece in split(change)]
        whole = Summary()
        for summary in summaries:
            if summary is None:
                return None
            whole.add(summary)
        return whole

    async def _publish(self, change: Change) -> Summary | None:
        entry = _Entry(next(self._ids), change)
        if not self._is_open:
            self._apply_here(entry)
            return entry.summary
        self._sent[entry.change_id] = entry
        try:
            await self._acknowledged(entry)
        except (TimeoutError, Unavailable) as error:
            self.close(f"a change was not taken ({type(error).__name__})")
        self.fates[Fate.LOGGED] += entry.summary is None
        try:
            async with asyncio.timeout(BACK_S):
                await entry.applied.wait()
        except TimeoutError:
            return None
        return entry.summary

    async def _acknowledged(self, entry: _Entry) -> None:
        appending = asyncio.ensure_future(self._append(entry))
        try:
            for _ in range(2):  # a loop that was held up uses up one of them: the answer may be there, unread
                await asyncio.wait({appending}, timeout=ACK_S / 2)
                if appending.done():
                    return appending.result()
        finally:
            appending.cancel()
        raise TimeoutError

    async def _append(self, entry: _Entry) -> None:
        entry.at_s = self._clock.monotonic()
        self._retained.append(entry)
        self._retained_weight += weight(entry.change)
        while self._retained and (
            self._retained_weight > MAX_RETAINED or self._retained[0].at_s < entry.at_s - RETAINED_S
        ):
            self._retained_weight -= weight(self._retained.popleft().change)
        await self._link.append(entry.change_id, entry.change)

    def close(self, reason: str) -> None:
        """The log is away: go on without it."""
        self._wants_open.set()
        self._came.set()
        if not self._is_open:
            return
        self._is_open = False
        log.warning("log.lost", reason=reason, unapplied_changes=len(self._sent))
        sent, self._sent = self._sent, OrderedDict()
        for entry in sent.values():
            self._apply_here(entry)

    def _apply_here(self, entry: _Entry) -> None:
        summary = self._applier.apply(entry.change)
        self._note_gaps(summary)
        entry.settle(summary)
        if _is_of_the_moment(entry.change):
            return
        entry_weight = weight(entry.change)
        if self._waiting_weight + entry_weight > self._max_waiting:
            self.fates[Fate.DROPPED] += 1
            if isinstance(entry.change, Reports):
                self._unsure.update(report.source.instance_id for report in entry.change.reports)
            return
        self.fates[Fate.APPLIED_HERE] += 1
        self._here[entry.change_id] = entry
        self._waiting.append(entry)
        self._waiting_weight += entry_weight

    def _note_gaps(self, summary: Summary) -> None:
        self._unsure.update(instance_id for instance_id, reason in summary.fences if reason is Fence.GAP)

    async def run(self) -> None:
        """Open the log whenever it is lost."""
        while True:
            await self._wants_open.wait()
            self._wants_open.clear()
            try:
                await self._open()
            except (TimeoutError, Unavailable) as error:
                log.debug("log.not_opened", error=type(error).__name__)
                self._has_looked.set()
                self._wants_open.set()
                await self._clock.sleep(RETRY_S)

    async def _open(self) -> None:
        opened = await self._link.open()
        known = self._position
        if known is None or known.log_id != opened.log_id:
            self._begin(opened)
        assert self._position is not None
        await self._link.follow(self._position.seq, self._hear, self.close)
        await self._catch_up(opened.last_seq)
        self._has_caught_up.set()
        self._has_looked.set()
        await self._drain()
        self._is_open = True
        log.info("log.opened", log_id=opened.log_id, seq=self._position.seq)

    def _begin(self, opened: Opened) -> None:
        """A log that this instance does not know yet."""
        if self._position is not None:
            waiting = set(self._waiting)
            again = [entry for entry in dict.fromkeys(self._retained) if entry not in waiting]
            self._waiting.extendleft(reversed(again))
            self._waiting_weight += sum(weight(entry.change) for entry in again)
            for entry in self._waiting:
                entry.is_back = False
        self._position = LogPosition(opened.log_id, opened.first_seq - 1)
        self._joined_at_s = self._clock.monotonic()

    async def _catch_up(self, last_seq: int) -> None:
        while self._position is not None and self._position.seq < last_seq:
            self._came.clear()
            async with asyncio.timeout(CATCH_UP_S):
                await self._came.wait()
            if self._wants_open.is_set():
                raise TimeoutError  # lost meanwhile

    async def _drain(self) -> None:
        """Publish what waits, in order, and what all must know of."""
        while self._waiting or self._unsure:
            if not self._waiting:
                self._tell_unsure()
            batch = self._first_waiting()
            async with asyncio.timeout(CATCH_UP_S):
                await asyncio.gather(*(self._append(entry) for entry in batch if not entry.is_back))
            for entry in batch:
                self._waiting.popleft()
                self._waiting_weight -= weight(entry.change)
            if self._wants_open.is_set():
                raise TimeoutError  # lost meanwhile

    def _first_waiting(self) -> list[_Entry]:
        """So many that they come back within a moment."""
        batch: list[_Entry] = []
        batch_weight = 0
        for entry in islice(self._waiting, DRAINED_AT_ONCE):
            batch_weight += weight(entry.change)
            if batch and batch_weight > DRAINED_WEIGHT:
                break
            batch.append(entry)
        return batch

    def _tell_unsure(self) -> None:
        unsure, self._unsure = self._unsure, set()
        for instance_id in sorted(unsure):
            at = self._instances.address_of(instance_id)
            host, http_port = (at.host, at.http_port) if at else ("", 0)
            sign = StoreSign(instance_id, Sign.REGISTERED, host, http_port, is_l1_void=True)
            entry = _Entry(next(self._ids), sign)
            self._waiting.append(entry)
            self._waiting_weight += 1

    def _hear(self, logged: Logged) -> None:
        """The next change of the log."""
        assert self._position is not None
        self.missed_changes += logged.seq - self._position.seq - 1
        self._position = LogPosition(self._position.log_id, logged.seq)
        self._came.set()
        is_first_look = not self._has_caught_up.is_set()
        sent = self._sent.pop(logged.change_id, None)
        here = self._here.pop(logged.change_id, None)
        mine = sent or here
        if mine is None and logged.change_id in self._seen:
            return
        self._seen[logged.change_id] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        change = mine.change if mine is not None else logged.read()
        if change is None:
            return
        summary = self._applier.apply(change, History(logged.age_s, here is not None, self._is_durable()))
        if is_first_look:
            self._note_gaps(summary)
        if mine is not None:
            mine.is_back = True
            mine.settle(summary)


def _is_of_the_moment(change: Change) -> bool:
    """Not worth telling after an outage: there was a later beat, and a claim would count from when it is heard."""
    return isinstance(change, PendingBlocks) or (isinstance(change, StoreSign) and change.sign is Sign.BEAT)
