"""Cuts a change into pieces that fit into one message of the log; applied in order they come to the same.

A report is one number of its server and is never cut; the edge refuses one that is too large.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from shoal_kvindex.ingest.changes import Change, Correction, Marks, PendingBlocks, Renewal, Renewals, Reports
from shoal_kvindex.ingest.reports import Report

MESSAGE_BYTES = 4 << 20  # half of what NATS takes: what is counted here is an upper estimate, but an estimate
PACKED_BYTES = 64 << 10  # of reports together: whoever applies a message holds its loop up so long, some milliseconds
BLOCK_BYTES = 44  # a hash and a size
BLOCKS = 2_000  # a message
GROUPED = 1_000  # runs of blocks a message: each may have a name of its own, of a thousand bytes
NAME_BYTES = 64  # beside the strings of a namespace

Item = TypeVar("Item")


def weight(change: Change) -> int:
    """How many blocks or objects a change names; at least 1."""
    match change:
        case Reports():
            return 1 + sum(len(report.objects) for report in change.reports)
        case Renewals():
            return 1 + sum(len(renewal.block_hashes) for renewal in change.renewals)
        case Marks():
            return 1 + sum(len(hashes) for _, hashes in change.blocks)
        case PendingBlocks():
            return 1 + len(change.block_hashes)
        case Correction():
            return 1 + len(change.found) + len(change.gone)
        case _:
            return 1


def report_bytes(report: Report) -> int:
    """What a report may take on the wire."""
    names = {(key.namespace, key.part) for key, _ in report.objects}
    of_names = sum(NAME_BYTES + 4 * len(namespace.pool + namespace.cache_salt) for namespace, _ in names)
    return NAME_BYTES + 4 * len(report.source.instance_id) + of_names + BLOCK_BYTES * len(report.objects)


def split(change: Change) -> Iterator[Change]:
    """The pieces, in order; mostly the change itself."""
    match change:
        case Reports():
            yield from (Reports(reports) for reports in _packed(change.reports))
        case Renewals():
            cut = ((r.namespace, hashes, r.expires_at_s) for r in change.renewals for hashes in _cut(r.block_hashes))
            for pieces in _grouped((Renewal(*piece) for piece in cut), lambda piece: len(piece.block_hashes)):
                yield Renewals(pieces)
        case Marks():
            runs = ((namespace, run) for namespace, hashes in change.blocks for run in _cut(hashes))
            for blocks in _grouped(runs, lambda run: len(run[1])):
                yield Marks(blocks, change.is_taken_back, change.is_for_room)
        case Correction():
            yield from _split_correction(change)
        case _:
            yield change


def _split_correction(change: Correction) -> Iterator[Correction]:
    if len(change.found) + len(change.gone) <= BLOCKS:
        yield change
        return
    for gone in _cut(change.gone):
        yield Correction(change.place, (), gone)
    for found in _cut(change.found):
        yield Correction(change.place, found, ())


def _packed(reports: Sequence[Report]) -> Iterator[list[Report]]:
    piece: list[Report] = []
    piece_bytes = 0
    for report in sorted(reports, key=lambda report: report.source):
        size_bytes = report_bytes(report)
        if piece and piece_bytes + size_bytes > PACKED_BYTES:
            yield piece
            piece, piece_bytes = [], 0
        piece.append(report)
        piece_bytes += size_bytes
    if piece:
        yield piece


def _cut(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    source = iter(items)
    while piece := list(islice(source, BLOCKS)):
        yield piece


def _grouped(items: Iterable[Item], blocks_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    group: list[Item] = []
    blocks = 0
    for item in items:
        if group and (blocks + blocks_of(item) > BLOCKS or len(group) >= GROUPED):
            yield group
            group, blocks = [], 0
        group.append(item)
        blocks += blocks_of(item)
    if group:
        yield group
