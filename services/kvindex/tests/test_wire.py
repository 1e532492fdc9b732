"""Every change survives the wire."""

import pytest

from shoal_contracts.v1 import common_pb2, kvindex_pb2
from shoal_kvindex.directory import SHARED, Level, Namespace, ObjectKey, Part, Place
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
from shoal_kvindex.wire import from_bytes, to_bytes

SPACE, TENANT = Namespace("pool", ""), Namespace("pool", "tenant")
BLOCKS = [number.to_bytes(32, "big") for number in range(3)]
KEYS = [ObjectKey(SPACE, BLOCKS[0], Part(0x01000100, 0)), ObjectKey(TENANT, BLOCKS[1], Part(0x02010201, 1))]
SOURCE = ReportSource("node-a", 1796053596, 7)

CHANGES: list[Change] = [
    Reports(
        [
            Report(SOURCE, Kind.STORE, Level.L1, False, [(KEYS[0], 10), (KEYS[1], 2**40)]),
            Report(SOURCE, Kind.DELETE, Level.L2, True, [(KEYS[1], 0)]),
            Report(SOURCE, Kind.CAPACITY, Level.L2, True, [], 2**45),
            Report(SOURCE, Kind.OTHER, Level.L1, False, []),
        ]
    ),
    StoreSign("node-a", Sign.REGISTERED, "10.0.0.1", 8080, is_l1_void=True),
    StoreSign("node-a", Sign.BEAT, "10.0.0.1", 8080, 2**45),
    StoreSign("node-a", Sign.LEFT),
    StoreSilent("node-a", Cursor(1796053596, 7)),
    Renewals([Renewal(SPACE, BLOCKS, 1_800_000_000), Renewal(TENANT, BLOCKS[:1], 1_800_000_001)]),
    Renewals([]),
    Marks([(SPACE, BLOCKS), (TENANT, BLOCKS[1:])], is_for_room=True),
    Marks([(SPACE, BLOCKS)], is_taken_back=True),
    PendingBlocks(SPACE, BLOCKS, "request-1", 2.5),
    PendingBlocks(SPACE, [], "request-1", 0.0),
    Correction(SHARED, [(KEYS[0], 10)], [KEYS[1]]),
    Correction(Place(Level.L1, "node-a"), [], [KEYS[1]]),
    IndexState(False, "node-a cannot list", "kvindex-1", ages=[]),
    IndexState(True, "", "kvindex-1", 1_800_000_000, SweepCounts(1, 2, 3, 4, 5, 6), [(3600, 10), (86400, 0)]),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: type(change).__name__)
def test_a_change_comes_back_as_it_was(change: Change) -> None:
    payload = to_bytes("kvindex-1", change)
    assert from_bytes(payload) == change
    assert kvindex_pb2.IndexChange.FromString(payload).publisher_id == "kvindex-1"


def test_what_a_later_version_says_is_left_out() -> None:
    assert from_bytes(kvindex_pb2.IndexChange(publisher_id="kvindex-1").SerializeToString()) is None
    sign = kvindex_pb2.StorePresence(store_instance_id="node-a", sign=99)  # type: ignore[arg-type]
    assert from_bytes(kvindex_pb2.IndexChange(presence=sign).SerializeToString()) is None


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff\xff",
        kvindex_pb2.IndexChange(
            marks=kvindex_pb2.Marks(blocks=[kvindex_pb2.BlockSet(block_hashes=b"short")])
        ).SerializeToString(),
        kvindex_pb2.IndexChange(
            correction=kvindex_pb2.Correction(
                level=common_pb2.L2, found=[kvindex_pb2.ObjectSet(block_hashes=bytes(64), size_bytes=[1])]
            )
        ).SerializeToString(),
        kvindex_pb2.IndexChange(correction=kvindex_pb2.Correction()).SerializeToString(),
    ],
)
def test_what_cannot_be_read_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError):
        from_bytes(payload)
