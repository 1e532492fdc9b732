"""Which instance of the index is asked, and what the gateway takes from its answer."""

import os

from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import fleet_pb2, kvindex_pb2
from shoal_gateway.links.kvindex import MAX_DRAM_STORES, _to_matched, by_prefix
from shoal_gateway.request import PendingRun
from shoal_kvblocks import HASH_BYTES
from shoal_runtime.presence import Member


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


PREFIXES = [os.urandom(HASH_BYTES) for _ in range(300)]


def index(name: str) -> Member:
    return Member(name, 1, fleet_pb2.KVINDEX, f"{name}:1", True, False, "", None, None)


def asked_first(names: list[str]) -> list[str]:
    return [by_prefix([index(name) for name in names], prefix)[0].instance_id for prefix in PREFIXES]


def test_prompts_spread_over_all_instances_and_a_prefix_stays_at_one() -> None:
    first = asked_first(["a", "b", "c"])
    assert {name: first.count(name) > 50 for name in "abc"} == {"a": True, "b": True, "c": True}
    assert asked_first(["c", "a", "b"]) == first


def test_only_the_prefixes_of_an_instance_that_left_move() -> None:
    before, after = asked_first(["a", "b", "c"]), asked_first(["a", "c"])
    assert [new for old, new in zip(before, after, strict=True) if old != "b"] == [old for old in before if old != "b"]


def test_everyone_is_asked_in_the_end() -> None:
    assert sorted(member.instance_id for member in by_prefix(map(index, "abc"), PREFIXES[0])) == ["a", "b", "c"]
