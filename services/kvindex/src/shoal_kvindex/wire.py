"""Changes of the index to protobuf and back. What this version does not know of a message is left out."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from google.protobuf.message import DecodeError

from shoal_contracts.v1 import common_pb2
from shoal_contracts.v1 import kvindex_pb2 as pb
from shoal_kvblocks import HASH_BYTES
from shoal_kvindex.directory import Level, Namespace, ObjectKey, Part, Place
from shoal_kvindex.ingest.changes import (
    Change,
    Correction,
    IndexState,
    Marks,
    PendingBlocks,
    Renewal,
    Renewals,
    Reports,
    Sign,
    StoreSign,
    StoreSilent,
    SweepCounts,
)
from shoal_kvindex.ingest.gate import Cursor
from shoal_kvindex.ingest.reports import Kind, Report, ReportSource

KINDS = {
    Kind.STORE: pb.StoreReport.STORED,
    Kind.DELETE: pb.StoreReport.DELETED,
    Kind.CAPACITY: pb.StoreReport.CAPACITY,
    Kind.OTHER: pb.StoreReport.KIND_UNSPECIFIED,
}
SIGNS = {
    Sign.REGISTERED: pb.StorePresence.REGISTERED,
    Sign.BEAT: pb.StorePresence.BEAT,
    Sign.LEFT: pb.StorePresence.LEFT,
}
_KINDS_READ = {number: kind for kind, number in KINDS.items()}
_SIGNS_READ = {number: sign for sign, number in SIGNS.items()}

Objects: TypeAlias = Sequence[tuple[ObjectKey, int]]


def to_bytes(publisher_id: str, change: Change) -> bytes:
    """The payload of one IndexChange."""
    message = pb.IndexChange(publisher_id=publisher_id)
    match change:
        case Reports():
            message.reports.reports.extend(_write_report(report) for report in change.reports)
        case StoreSign():
            _write_sign(message.presence, change)
        case StoreSilent():
            fence = message.fence
            fence.store_instance_id = change.instance_id
            fence.incarnation, fence.seq = change.cursor
        case Renewals():
            for renewal in change.renewals:
                blocks = _write_blocks(renewal.namespace, renewal.block_hashes)
                message.renewals.renewals.add(blocks=blocks, expires_at_unix_s=renewal.expires_at_s)
            message.renewals.SetInParent()
        case Marks():
            message.marks.blocks.extend(_write_blocks(*blocks) for blocks in change.blocks)
            message.marks.is_taken_back, message.marks.is_for_room = change.is_taken_back, change.is_for_room
        case PendingBlocks():
            message.pending.blocks.CopyFrom(_write_blocks(change.namespace, change.block_hashes))
            message.pending.request_id, message.pending.for_ms = change.request_id, round(change.for_s * 1000)
        case Correction():
            correction = message.correction
            correction.level, correction.store_instance_id = _level(change.place.level), change.place.instance_id
            correction.found.extend(_write_objects(change.found))
            correction.gone.extend(_write_objects([(key, 0) for key in change.gone], has_sizes=False))
        case IndexState():
            _write_state(message.state, change)
    payload: bytes = message.SerializeToString()
    return payload


def from_bytes(payload: bytes) -> Change | None:
    """None for a change that this version does not know. ValueError when it cannot be read."""
    try:
        message = pb.IndexChange.FromString(payload)
    except DecodeError as error:
        raise ValueError("does not parse") from error
    kind = message.WhichOneof("change")
    return _READERS[kind](message) if kind is not None else None


def _level(level: Level) -> common_pb2.Level.ValueType:
    return common_pb2.L1 if level is Level.L1 else common_pb2.L2


def _write_report(report: Report) -> pb.StoreReport:
    source = report.source
    return pb.StoreReport(
        store_instance_id=source.instance_id,
        incarnation=source.incarnation,
        seq=source.seq,
        kind=KINDS[report.kind],
        level=_level(report.level),
        is_shared=report.is_shared,
        objects=_write_objects(report.objects),
        capacity_bytes=report.capacity_bytes,
    )


def _write_sign(message: pb.StorePresence, change: StoreSign) -> None:
    message.store_instance_id = change.instance_id
    message.host, message.http_port = change.host, change.http_port
    message.sign = SIGNS[change.sign]
    message.shared_capacity_bytes = change.shared_capacity_bytes
    message.is_l1_void = change.is_l1_void


def _write_objects(objects: Objects, *, has_sizes: bool = True) -> list[pb.ObjectSet]:
    together: dict[tuple[Namespace, Part], list[tuple[bytes, int]]] = {}
    for key, size_bytes in objects:
        together.setdefault((key.namespace, key.part), []).append((key.block_hash, size_bytes))
    return [
        pb.ObjectSet(
            pool=namespace.pool,
            cache_salt=namespace.cache_salt,
            kv_rank=part.kv_rank,
            object_group_id=part.object_group_id,
            block_hashes=b"".join(block_hash for block_hash, _ in entries),
            size_bytes=[size_bytes for _, size_bytes in entries] if has_sizes else (),
        )
        for (namespace, part), entries in together.items()
    ]


def _write_blocks(namespace: Namespace, block_hashes: Sequence[bytes]) -> pb.BlockSet:
    return pb.BlockSet(pool=namespace.pool, cache_salt=namespace.cache_salt, block_hashes=b"".join(block_hashes))


def _write_state(message: pb.IndexState, state: IndexState) -> None:
    message.is_complete, message.reason, message.lease_holder = state.is_complete, state.reason, state.lease_holder
    if state.last_listing_s is not None:
        message.last_listing_unix_s = state.last_listing_s
    message.sweep.CopyFrom(sweep_on_wire(state))
    message.ages.extend(ages_on_wire(state))


def sweep_on_wire(state: IndexState) -> pb.SweepOverview:
    """What the holder of the lease did; for operators with the time of its last listing."""
    counts = state.sweep
    return pb.SweepOverview(
        marked_blocks=counts.marked_blocks,
        renewed_blocks=counts.renewed_blocks,
        expired_blocks=counts.expired_blocks,
        evicted_blocks=counts.evicted_blocks,
        orphan_objects=counts.orphan_objects,
        phantom_objects=counts.phantom_objects,
        last_listing_unix_s=state.last_listing_s,
    )


def ages_on_wire(state: IndexState) -> list[pb.AgeOverview]:
    """By when blocks expire."""
    return [pb.AgeOverview(expires_within_s=within_s, blocks=blocks) for within_s, blocks in state.ages]


def _read_hashes(joined: bytes) -> list[bytes]:
    if len(joined) % HASH_BYTES:
        raise ValueError("hashes are cut short")
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


def _read_objects(sets: Iterable[pb.ObjectSet]) -> list[tuple[ObjectKey, int]]:
    objects = []
    for one in sets:
        namespace, part = Namespace(one.pool, one.cache_salt), Part(one.kv_rank, one.object_group_id)
        hashes = _read_hashes(one.block_hashes)
        sizes = one.size_bytes or [0] * len(hashes)
        objects += [(ObjectKey(namespace, h, part), size) for h, size in zip(hashes, sizes, strict=True)]
    return objects


def _read_blocks(blocks: pb.BlockSet) -> tuple[Namespace, list[bytes]]:
    return Namespace(blocks.pool, blocks.cache_salt), _read_hashes(blocks.block_hashes)


def _read_reports(message: pb.IndexChange) -> Reports:
    return Reports(
        [
            Report(
                ReportSource(report.store_instance_id, report.incarnation, report.seq),
                _KINDS_READ.get(report.kind, Kind.OTHER),
                Level(report.level),
                report.is_shared,
                _read_objects(report.objects),
                report.capacity_bytes,
            )
            for report in message.reports.reports
        ]
    )


def _read_sign(message: pb.IndexChange) -> StoreSign | None:
    sign = _SIGNS_READ.get(message.presence.sign)
    if sign is None:
        return None
    told = message.presence
    capacity_bytes = told.shared_capacity_bytes
    return StoreSign(told.store_instance_id, sign, told.host, told.http_port, capacity_bytes, told.is_l1_void)


def _read_silent(message: pb.IndexChange) -> StoreSilent:
    return StoreSilent(message.fence.store_instance_id, Cursor(message.fence.incarnation, message.fence.seq))


def _read_renewals(message: pb.IndexChange) -> Renewals:
    renewals = message.renewals.renewals
    return Renewals([Renewal(*_read_blocks(one.blocks), one.expires_at_unix_s) for one in renewals])


def _read_marks(message: pb.IndexChange) -> Marks:
    marks = message.marks
    return Marks([_read_blocks(blocks) for blocks in marks.blocks], marks.is_taken_back, marks.is_for_room)


def _read_pending(message: pb.IndexChange) -> PendingBlocks:
    pending = message.pending
    return PendingBlocks(*_read_blocks(pending.blocks), pending.request_id, pending.for_ms / 1000)


def _read_correction(message: pb.IndexChange) -> Correction:
    correction = message.correction
    place = Place(Level(correction.level), correction.store_instance_id)
    return Correction(place, _read_objects(correction.found), [key for key, _ in _read_objects(correction.gone)])


def _read_state(message: pb.IndexChange) -> IndexState:
    state, sweep = message.state, message.state.sweep
    counts = SweepCounts(
        marked_blocks=sweep.marked_blocks,
        renewed_blocks=sweep.renewed_blocks,
        expired_blocks=sweep.expired_blocks,
        evicted_blocks=sweep.evicted_blocks,
        orphan_objects=sweep.orphan_objects,
        phantom_objects=sweep.phantom_objects,
    )
    return IndexState(
        is_complete=state.is_complete,
        reason=state.reason,
        lease_holder=state.lease_holder,
        last_listing_s=state.last_listing_unix_s if state.HasField("last_listing_unix_s") else None,
        sweep=counts,
        ages=[(age.expires_within_s, age.blocks) for age in state.ages],
    )


_READERS: dict[str, Callable[[pb.IndexChange], Change | None]] = {
    "reports": _read_reports,
    "presence": _read_sign,
    "fence": _read_silent,
    "renewals": _read_renewals,
    "marks": _read_marks,
    "pending": _read_pending,
    "correction": _read_correction,
    "state": _read_state,
}
