"""Which window objects are shared, which stay in DRAM, and when those go."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import pytest
from lmcache.v1.distributed.api import AttnWindowDesc, GroupedObjectKeys, ObjectKey, PrefetchLockMode, PrefetchTaskSpec
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.multiprocess.engine_context import LayoutDescRegistry

from shoal_kvstore import level_policy
from shoal_kvstore.level_policy import LevelPolicy, WindowSizes, build_level_module, loading_prefixes

WINDOW, FULL = 0, 1  # object groups
WINDOW_BLOCKS = 2
AGE_S = 180.0
RANK = 0x01000100


def a_key(block: int, group: int, *, prompt: int = 0, salt: str = "", rank: int = RANK) -> ObjectKey:
    return ObjectKey(bytes([prompt, block]) + bytes(30), "pool", rank, group, salt)


def a_run(blocks: range, *, prompt: int = 0, salt: str = "") -> list[ObjectKey]:
    """As LMCache tells it: group by group, each in the order of the blocks."""
    return [a_key(block, group, prompt=prompt, salt=salt) for group in (WINDOW, FULL) for block in blocks]


def windows_of(keys: Sequence[ObjectKey]) -> list[int]:
    return [key.chunk_hash[1] for key in keys if key.object_group_id == WINDOW]


def full_of(keys: Sequence[ObjectKey]) -> list[int]:
    return [key.chunk_hash[1] for key in keys if key.object_group_id == FULL]


class AServer:
    """One L1 with its policy; ``locked`` cannot be deleted."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.shared: list[ObjectKey] = []
        self.asked: list[ObjectKey] = []
        self.locked: set[ObjectKey] = set()
        self.absent: set[ObjectKey] = set()
        self.on_delete: Callable[[], None] = lambda: None
        self.policy = LevelPolicy(
            lambda key: WINDOW_BLOCKS if key.object_group_id == WINDOW else None,
            self.shared.extend,
            self.delete,
            lambda: self.now_s,
        )

    def delete(self, keys: list[ObjectKey]) -> Mapping[ObjectKey, L1Error]:
        self.asked = list(keys)
        self.on_delete()
        results = {key: self._result(key) for key in keys}
        self.policy.on_l1_keys_deleted_by_manager([key for key in keys if results[key] is L1Error.SUCCESS])
        return results

    def _result(self, key: ObjectKey) -> L1Error:
        if key in self.locked:
            return L1Error.KEY_IS_LOCKED
        return L1Error.KEY_NOT_EXIST if key in self.absent else L1Error.SUCCESS


@pytest.fixture
def server() -> AServer:
    return AServer()


def test_of_a_run_all_of_full_attention_is_shared_and_the_last_window(server: AServer) -> None:
    server.policy.on_l1_keys_write_finished(a_run(range(10)))
    assert full_of(server.shared) == list(range(10))
    assert windows_of(server.shared) == [8, 9]


def test_runs_of_several_requests_keep_a_window_each(server: AServer) -> None:
    for prompt in (1, 2):
        server.policy.on_l1_keys_write_finished(a_run(range(5), prompt=prompt))
    assert windows_of(server.shared) == [3, 4, 3, 4]


def test_ranks_and_salts_in_one_call_are_runs_of_their_own(server: AServer) -> None:
    other_rank = [a_key(block, WINDOW, rank=0x02010201) for block in range(4)]
    server.policy.on_l1_keys_write_finished([*a_run(range(4)), *other_rank, *a_run(range(4), salt="tenant")])
    assert windows_of(server.shared) == [2, 3, 2, 3, 2, 3]


def test_a_run_shorter_than_the_window_is_shared_whole(server: AServer) -> None:
    server.policy.on_l1_keys_write_finished(a_run(range(7, 8)))
    assert (windows_of(server.shared), full_of(server.shared)) == ([7], [7])


def test_a_window_that_a_hit_goes_on_from_is_shared_once(server: AServer) -> None:
    server.policy.on_l1_keys_write_finished(a_run(range(10)))
    server.shared.clear()
    hit = [a_key(4, WINDOW), a_key(5, WINDOW), *(a_key(block, FULL) for block in range(6))]
    server.policy.on_l1_keys_accessed(hit)
    server.policy.on_l1_keys_accessed(hit)
    assert (windows_of(server.shared), full_of(server.shared)) == ([4, 5], [])


def test_the_end_of_a_request_is_no_hit_of_all_its_blocks(server: AServer) -> None:
    server.policy.on_l1_keys_write_finished(a_run(range(10)))
    server.shared.clear()
    server.now_s += AGE_S
    server.policy.on_l1_keys_accessed(a_run(range(10)))
    assert server.shared == []
    assert server.policy.expire(AGE_S) == 10


def test_a_window_from_the_shared_level_is_not_shared_again(server: AServer) -> None:
    loaded = [a_key(4, WINDOW), a_key(5, WINDOW)]
    server.policy.on_l1_keys_finish_write_and_reserve_read(loaded)
    server.policy.on_l1_keys_accessed(loaded)
    assert server.shared == []


def test_windows_go_when_nobody_hit_them_for_the_age_and_full_attention_stays(server: AServer) -> None:
    server.policy.on_l1_keys_write_finished(a_run(range(4)))
    server.now_s += AGE_S / 2
    assert server.policy.expire(AGE_S) == 0
    server.policy.on_l1_keys_accessed([a_key(0, WINDOW), a_key(1, WINDOW)])
    server.now_s += AGE_S / 2
    assert server.policy.expire(AGE_S) == 2
    assert windows_of(server.asked) == [2, 3]
    server.now_s += AGE_S
    assert server.policy.expire(AGE_S) == 2
    assert full_of(server.asked) == []
    assert server.policy.expire(AGE_S) == 0


def test_what_is_locked_stays_until_it_is_not(server: AServer) -> None:
    server.policy.on_l1_keys_write_finished(a_run(range(3)))
    server.locked = {a_key(0, WINDOW)}
    server.now_s += AGE_S
    assert server.policy.expire(AGE_S) == 2
    server.locked.clear()
    assert server.policy.expire(AGE_S) == 1
    assert windows_of(server.asked) == [0]


def test_a_round_takes_all_that_are_overdue_in_slices_and_locked_ones_hold_up_nobody(
    server: AServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(level_policy, "_SLICE_OBJECTS", 2)
    server.policy.on_l1_keys_write_finished(a_run(range(7)))
    server.locked = {a_key(0, WINDOW), a_key(1, WINDOW)}
    server.now_s += AGE_S
    assert server.policy.expire(AGE_S) == 5
    assert windows_of(server.asked) == [6]


def test_a_window_that_is_hit_while_others_go_stays(server: AServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level_policy, "_SLICE_OBJECTS", 2)
    server.policy.on_l1_keys_write_finished(a_run(range(4)))
    server.now_s += AGE_S
    server.on_delete = lambda: server.policy.on_l1_keys_accessed([a_key(2, WINDOW), a_key(3, WINDOW)])
    assert server.policy.expire(AGE_S) == 2
    server.now_s += AGE_S
    server.on_delete = lambda: None
    assert server.policy.expire(AGE_S) == 2
    assert windows_of(server.asked) == [2, 3]


def test_what_is_no_longer_there_is_asked_for_once(server: AServer) -> None:
    server.policy.on_l1_keys_write_finished(a_run(range(2)))
    server.absent = {a_key(0, WINDOW), a_key(1, WINDOW)}
    server.now_s += AGE_S
    assert server.policy.expire(AGE_S) == 0
    server.asked.clear()
    assert server.policy.expire(AGE_S) == 0
    assert server.asked == []


def a_registry(sizes: list[int]) -> LayoutDescRegistry:
    registry = LayoutDescRegistry()
    registry.register("pool", 1, SimpleNamespace(), AttnWindowDesc(num_chunks_in_sw=sizes))
    return registry


def test_sizes_come_from_what_engines_registered_and_outlive_the_engine() -> None:
    registry = a_registry([2, -1])
    sizes = WindowSizes(registry)
    assert (sizes.of(a_key(0, WINDOW)), sizes.of(a_key(0, FULL))) == (2, None)
    registry.unregister("pool", 1)
    assert sizes.of(a_key(0, WINDOW)) == 2


def test_what_no_engine_told_is_full_attention_until_it_is_told() -> None:
    registry = LayoutDescRegistry()
    sizes = WindowSizes(registry)
    assert sizes.of(a_key(0, WINDOW)) is None
    registry.register("pool", 1, SimpleNamespace(), AttnWindowDesc(num_chunks_in_sw=[2, -1]))
    assert sizes.of(a_key(0, WINDOW)) == 2
    assert sizes.of(a_key(0, 7)) is None


@pytest.mark.parametrize(("windows", "policy"), [([-1], "full"), ([2, -1], "prefix")])
def test_a_prefetch_of_a_model_with_windows_brings_the_longest_prefix(windows: list[int], policy: str) -> None:
    submitted: list[PrefetchTaskSpec] = []
    groups = [
        GroupedObjectKeys([a_key(0, group)], group, layout_desc=None, sliding_window_size=size)
        for group, size in enumerate(windows)
    ]
    spec = PrefetchTaskSpec(key_groups=groups, fetching_policy="full", lock_mode=PrefetchLockMode.NO_LOCK)

    def submit(spec: PrefetchTaskSpec, request_id: str = "", *, skip_l2: bool = False) -> None:
        submitted.append(spec)
        assert (request_id, skip_l2) == ("request", True)

    loading_prefixes(submit)(spec, "request", skip_l2=True)
    assert [found.fetching_policy for found in submitted] == [policy]


@pytest.mark.parametrize("window_age_s", [0, -1, "180", True, None])
def test_an_age_that_is_none_stops_the_server(window_age_s: object) -> None:
    with pytest.raises(ValueError, match="window_age_s"):
        build_level_module(SimpleNamespace(config={"window_age_s": window_age_s}))
