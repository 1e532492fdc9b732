"""What the gateway takes from the index's answer."""

from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import kvindex_pb2
from shoal_gateway.links.kvindex import MAX_DRAM_STORES, _to_matched
from shoal_gateway.request import PendingRun


def level(blocks: int, store: str = "") -> kvindex_pb2.LevelHit:
    return kvindex_pb2.LevelHit(level=pb.L1 if store else pb.L2, store_instance_id=store, blocks=blocks)


def test_only_stores_with_the_whole_hit_in_dram_are_named() -> None:
    reply = kvindex_pb2.MatchReply(hit_blocks=4, levels=[level(5), level(4, "node-a"), level(3, "node-b")])
    matched = _to_matched(reply)
    assert (matched.hit_blocks, matched.pending, matched.dram_store_ids) == (4, None, ("node-a",))


def test_no_hit_lies_nowhere_and_names_are_bounded() -> None:
    assert _to_matched(kvindex_pb2.MatchReply(levels=[level(0, "node-a")])).dram_store_ids == ()
    levels = [level(2, f"node-{number}") for number in range(3 * MAX_DRAM_STORES)]
    assert len(_to_matched(kvindex_pb2.MatchReply(hit_blocks=2, levels=levels)).dram_store_ids) == MAX_DRAM_STORES


def test_pending_blocks_are_told() -> None:
    reply = kvindex_pb2.MatchReply(hit_blocks=1, pending=kvindex_pb2.Pending(blocks=5, request_id="other"))
    assert _to_matched(reply).pending == PendingRun(5, "other")
