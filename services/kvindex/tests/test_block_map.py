"""The bounded map: what stays, what it costs the garbage collector."""

import gc
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_kvindex.block_map import EXAMINED_BLOCKS, SHARDS, Block, BlockMap
from shoal_kvindex.directory import Namespace

SPACE, TENANT = Namespace("pool", ""), Namespace("pool", "tenant")
FRESH, USED = Block(100, (1,)), Block(100, (1,), is_used=True)


def hashes(count: int, seed: int = 0) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(32) for _ in range(count)]


def filled(blocks: list[bytes], max_blocks: int) -> BlockMap:
    found = BlockMap(max_blocks)
    for block_hash in blocks:
        found.put(SPACE, block_hash, FRESH)
    return found


@settings(deadline=None, max_examples=50)
@given(
    st.builds(
        Block,
        st.integers(0, 2**40),
        st.lists(st.integers(0, 2**32 - 1), max_size=9).map(tuple),
        st.booleans(),
        st.booleans(),
    )
)
def test_a_packed_block_is_the_block(block: Block) -> None:
    assert Block.unpack(block.pack()) == block


def test_equal_blocks_share_one_value() -> None:
    found = filled(hashes(2), 10)
    first, second = (found.get(SPACE, block_hash) for block_hash in hashes(2))
    assert first is second


def test_the_garbage_collector_has_nothing_to_look_at() -> None:
    found = filled(hashes(100), 1000)
    gc.collect()
    assert not any(gc.is_tracked(shard) for shards in found._namespaces.values() for shard in shards.by_byte)


def test_a_run_ends_at_the_first_unknown_block() -> None:
    blocks = hashes(3)
    found = filled([blocks[0], blocks[2]], 10)
    assert len(found.run(SPACE, blocks)) == 1
    assert [value is None for value in found.get_all(SPACE, blocks)] == [False, True, False]
    assert found.run(TENANT, blocks) == []
    assert found.get_all(TENANT, blocks) == [None] * 3


def test_what_was_used_is_spared_and_what_came_first_leaves_first() -> None:
    blocks = [bytes([7, number]) + bytes(30) for number in range(100)]
    found = filled(blocks, 50)
    for block_hash in blocks[:10]:
        found.put(SPACE, block_hash, USED)
    while found.is_over:
        found.evict()
    assert [found.get(SPACE, block_hash) is not None for block_hash in blocks] == [
        number < 10 or number >= 60 for number in range(100)
    ]


def test_sparing_is_for_once() -> None:
    blocks = [bytes([7, number]) + bytes(30) for number in range(20)]
    found = filled(blocks, 10)
    found.put(SPACE, blocks[0], USED)
    left = {evicted.block_hash for _ in range(20) for evicted in found.evict()}
    assert left == set(blocks)
    assert len(found) == 0
    assert found.namespaces() == []


def test_where_all_were_used_one_leaves_all_the_same() -> None:
    blocks = hashes(2000)
    found = filled(blocks, 1999)
    for block_hash in blocks:
        found.put(SPACE, block_hash, USED)
    assert len(found.evict()) == 1
    spared = sum(value == FRESH.pack() for value in found.get_all(SPACE, blocks))
    assert spared == EXAMINED_BLOCKS - 1  # the first of them left


def test_room_is_made_in_the_largest_namespace_and_in_all_its_shards_alike() -> None:
    blocks = hashes(50_000)
    found = filled(blocks, 40_000)
    found.put(TENANT, blocks[0], FRESH)
    while found.is_over:
        assert len(found.evict()) <= EXAMINED_BLOCKS
    sizes = [len(found.shard(SPACE, first_byte)) for first_byte in range(SHARDS)]
    assert max(sizes) - min(sizes) < 200
    assert found.get(TENANT, blocks[0]) is not None
    assert len(found) == sum(sizes) + 1
