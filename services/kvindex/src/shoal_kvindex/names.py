"""The names of what is stored: namespace, hash, part and place say which object lies where."""

import enum
from typing import NamedTuple


class Level(enum.IntEnum):
    """Where a copy lives; the numbers are the wire's and the table's."""

    L1 = 1  # DRAM of one lmcache server
    L2 = 2  # shared: readable from every node


class Namespace(NamedTuple):
    """Blocks of different namespaces are never the same."""

    pool: str
    cache_salt: str


class Part(NamedTuple):
    """Which object of a block: the store keeps one for each rank of the engine and each group of layers."""

    kv_rank: int
    object_group_id: int

    @property
    def world_size(self) -> int:
        """How many ranks the engine has that wrote it; the rank number carries it in its highest byte."""
        return self.kv_rank >> 24


class Place(NamedTuple):
    """Where a copy is. ``instance_id`` is "" on the shared level, which belongs to nobody."""

    level: Level
    instance_id: str


SHARED = Place(Level.L2, "")


class ObjectKey(NamedTuple):
    """The full name of one object of a block."""

    namespace: Namespace
    block_hash: bytes
    part: Part
