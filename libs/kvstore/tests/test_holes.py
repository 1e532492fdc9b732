"""A hole in a stored prefix is lost blocks; what lies behind a prefix is not."""

import pytest
from lmcache.v1.distributed.api import ObjectKey

from shoal_kvstore import holes
from shoal_kvstore.holes import SETTLED_S, Holes, lost_places

NOW = 1000.0
OLD = NOW - SETTLED_S


def a_run(count: int, group: int = 0) -> list[ObjectKey]:
    return [ObjectKey(bytes([number]) * 32, "pool", 0, group) for number in range(count)]


@pytest.mark.parametrize(
    ("written_at", "lost"),
    [
        ([OLD, OLD, OLD], []),
        ([OLD, OLD, None, None], []),  # the end of what is stored
        ([None, None], []),
        ([OLD, None, OLD, OLD], [1]),
        ([None, OLD], [0]),
        ([OLD, None, None, OLD, None, OLD], [1, 2]),  # the first hole ends every hit
        ([OLD, None, NOW, OLD], []),  # being stored right now
        ([OLD, None, NOW - SETTLED_S + 1], []),
        ([OLD, None, NOW + 50], []),  # a clock that is ahead
    ],
)
def test_what_is_lost(written_at, lost):
    assert lost_places(a_run(len(written_at)), written_at, NOW) == lost


def test_each_group_is_a_run_of_its_own():
    keys = [*a_run(3, group=0), *a_run(3, group=1)]
    assert lost_places(keys, [OLD, OLD, None, OLD, None, OLD], NOW) == [4]


def test_a_hole_is_found_once_until_it_is_filled():
    found = Holes()
    keys, written_at = a_run(3), [OLD, None, OLD]
    assert found.found(keys, written_at, NOW) == [keys[1]]
    assert found.found(keys, written_at, NOW) == []
    found.filled(keys)
    assert found.found(keys, written_at, NOW) == [keys[1]]


def test_holes_of_windows_are_meant():
    found = Holes()
    found.is_windowed = lambda key: key.object_group_id == 1
    keys = [*a_run(3, group=0), *a_run(3, group=1)]
    assert found.found(keys, [OLD, None, OLD] * 2, NOW) == [keys[1]]


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(holes, "MAX_TOLD", 2)
    found = Holes()
    keys = a_run(5)
    assert found.found(keys, [None, None, None, None, OLD], NOW) == keys[:4]
    assert found.found(keys[3:], [None, OLD], NOW) == []
    assert found.found(keys, [None, OLD, OLD, OLD, OLD], NOW) == [keys[0]]
