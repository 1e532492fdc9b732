"""Who can read a block: what its objects at their places come to, for the groups of layers that are asked for. Pure."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple, TypeAlias

from shoal_kvindex.names import SHARED, Level, Part, Place


class Readable(NamedTuple):
    """Who can read the state that every block must have, and, for each windowed group of the pool, who that of it."""

    is_shared: bool  # everybody
    instance_ids: frozenset[str]  # engines at these lmcache servers, from their DRAM alone
    joined_ids: frozenset[str] = frozenset()  # further ones, from their DRAM and the shared level together
    windows: tuple["Readable", ...] = ()


Stretch: TypeAlias = tuple[Readable, int]  # so many blocks, one after the other, that are readable alike


def readable(
    objects: Iterable[tuple[Place, Part]], everywhere: Set[int], windowed_groups: Sequence[int] = ()
) -> Readable:
    """``everywhere`` are the groups that every block needs."""
    parts: dict[Place, set[Part]] = {}
    for place, part in objects:
        parts.setdefault(place, set()).add(part)
    windows = tuple(_readable(parts, {group}) for group in windowed_groups)
    return _readable(parts, everywhere)._replace(windows=windows)


def _readable(parts: Mapping[Place, Set[Part]], groups: Set[int]) -> Readable:
    shared = parts.get(SHARED, frozenset())
    if is_whole(shared, groups):
        alone = (place.instance_id for place in parts if place.level is Level.L1 and is_whole(parts[place], groups))
        return Readable(True, frozenset(alone))
    in_dram = {place.instance_id: found for place, found in parts.items() if place.level is Level.L1}
    whole = frozenset(instance_id for instance_id, found in in_dram.items() if is_whole(found, groups))
    joined = {instance_id for instance_id, found in in_dram.items() if shared and is_whole(found | shared, groups)}
    return Readable(False, whole, frozenset(joined - whole))


def is_whole(parts: Iterable[Part], groups: Iterable[int]) -> bool:
    """Whether a copy can be loaded: every group of layers is there from all ranks of one engine shape."""
    ranks: dict[tuple[int, int], set[int]] = {}
    for part in parts:
        ranks.setdefault((part.object_group_id, part.world_size), set()).add(part.kv_rank)
    whole_groups = {group for (group, world_size), found in ranks.items() if len(found) >= world_size}
    return whole_groups.issuperset(groups)
