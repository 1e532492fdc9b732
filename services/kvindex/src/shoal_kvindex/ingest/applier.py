"""Applies a change to everything that it changes: the one door into the index for what the instances tell each other.

Called for each change in the log's order, in every instance alike; it never waits. What a change did to the map is
told to the journal, and the relay is deaf meanwhile: what came from the log need not go there.
docs/decisions/0008-kvindex-scales.md
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shoal_kvindex.directory import SHARED, Directory
from shoal_kvindex.ingest.apply import Awaited, Ingest
from shoal_kvindex.ingest.changes import (
    Change,
    Correction,
    IndexState,
    Marks,
    PendingBlocks,
    Renewals,
    Reports,
    Sign,
    StoreSign,
    StoreSilent,
)
from shoal_kvindex.ingest.completeness import Completeness
from shoal_kvindex.ingest.instances import Address, StoreInstances
from shoal_kvindex.ingest.relay import Relay
from shoal_kvindex.ingest.reports import Fence, Summary, shared_capacities
from shoal_runtime.clock import Clock


@dataclass(frozen=True, slots=True)
class Parts:
    """What changes act upon."""

    directory: Directory
    ingest: Ingest
    instances: StoreInstances
    completeness: Completeness
    awaited: Awaited
    relay: Relay


class History(NamedTuple):
    """What became of a change before it is applied."""

    age_s: float = 0.0  # how long the log had it before this instance came
    is_again: bool = False  # it was applied here before, out of the log's order
    is_durable: bool = False  # it is in the directory as it was loaded


NEW = History()


class Applier:
    """On the loop that answers requests. ``observe`` is told what each change came to, for the metrics."""

    def __init__(self, parts: Parts, clock: Clock, observe: Callable[[Summary], None]) -> None:
        self._parts = parts
        self._clock = clock
        self._observe = observe

    def apply(self, change: Change, history: History = NEW) -> Summary:
        """Returns what it came to."""
        with self._parts.relay.deaf():
            summary = self._dispatch(change, history)
        self._observe(summary)
        return summary

    def _dispatch(self, change: Change, history: History) -> Summary:
        summary = Summary()
        match change:
            case Reports():
                return self._reports(change, history)
            case StoreSign():
                self._sign(change, history, summary)
            case StoreSilent():
                self._silent(change, history, summary)
            case Renewals():
                self._renew(change)
            case Marks():
                self._mark(change)
            case PendingBlocks():
                self._pending(change, history)
            case Correction():
                self._correct(change, history)
            case IndexState():
                self._parts.completeness.tell(change)
        return summary

    def _reports(self, change: Reports, history: History) -> Summary:
        if history.is_durable:  # only what no table has
            summary = Summary()
            summary.capacities = shared_capacities(change.reports)
        else:
            summary = self._parts.ingest.apply(change.reports, is_again=history.is_again)
        for instance_id, _ in summary.fences:
            self._parts.completeness.fence(instance_id)
        for instance_id, capacity_bytes in summary.capacities.items():
            self._parts.instances.tell_capacity(instance_id, capacity_bytes)
        return summary

    def _sign(self, change: StoreSign, history: History, summary: Summary) -> None:
        instances, instance_id = self._parts.instances, change.instance_id
        if change.sign is Sign.LEFT:
            instances.deregister(instance_id)
            self._fence(instance_id, Fence.LEFT, history, summary)
            self._parts.completeness.leave(instance_id)
            return
        if change.is_l1_void:
            self._fence(instance_id, Fence.RESTARTED, history, summary)
        # A beat of a server that this instance does not know comes from one that registered before it was there.
        is_news = change.sign is Sign.REGISTERED or not instances.beat(instance_id)
        if is_news and change.host:
            instances.register(instance_id, Address(change.host, change.http_port))
        if change.shared_capacity_bytes:
            instances.tell_capacity(instance_id, change.shared_capacity_bytes)

    def _silent(self, change: StoreSilent, history: History, summary: Summary) -> None:
        cursor = self._parts.ingest.gate.cursor(change.instance_id)
        if cursor is not None and cursor > change.cursor:
            return  # it reported since: it is there
        self._parts.instances.deregister(change.instance_id)
        self._fence(change.instance_id, Fence.SILENT, history, summary)

    def _fence(self, instance_id: str, reason: Fence, history: History, summary: Summary) -> None:
        self._parts.completeness.fence(instance_id)
        if history.is_again or history.is_durable:
            return  # its copies were dropped then; those that are known now were reported later
        self._parts.ingest.fence(instance_id, reason)
        summary.fences.append((instance_id, reason))

    def _correct(self, change: Correction, history: History) -> None:
        if not history.is_durable and (change.place == SHARED or not history.is_again):
            self._parts.ingest.correct(change)

    def _renew(self, change: Renewals) -> None:
        directory, claims = self._parts.directory, self._parts.awaited.claims
        now_s = self._clock.monotonic()
        for renewal in change.renewals:
            unknown = directory.extend(renewal.namespace, renewal.block_hashes, renewal.expires_at_s)
            for block_hash in unknown:  # its report comes after its use
                claims.add(renewal.namespace, block_hash, renewal.expires_at_s, now_s)

    def _mark(self, change: Marks) -> None:
        directory = self._parts.directory
        for namespace, block_hashes in change.blocks:
            if change.is_taken_back:
                directory.unmark(namespace, block_hashes)
            else:
                directory.mark(namespace, block_hashes, is_for_room=change.is_for_room)

    def _pending(self, change: PendingBlocks, history: History) -> None:
        for_s = max(0.0, change.for_s - history.age_s)
        self._parts.awaited.prefixes.hear(
            change.namespace, change.block_hashes, change.request_id, for_s, self._clock.monotonic()
        )
