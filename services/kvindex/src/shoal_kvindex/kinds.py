"""What the groups of layers of a pool need of a prefix: the state of all its blocks, or of the last few only.

The store keeps one object a block, rank and group, and numbers the groups; what a number means only the engines know,
and tell with their presence. Without their word every group that was ever reported is needed of every block.
docs/decisions/0011-state-kinds-have-their-own-policy.md
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """One object group: full attention when ``window_tokens`` is None."""

    object_group_id: int
    window_tokens: int | None = None
    is_replayable: bool = False  # the engine can rebuild a missing window


@dataclass(frozen=True, slots=True)
class Window:
    """A prefix needs the last ``blocks`` of this group; a replayable one costs ``tokens`` when they are not there."""

    object_group_id: int
    tokens: int
    blocks: int
    is_replayable: bool


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """What the engines of a pool say about its groups."""

    block_tokens: int
    groups: tuple[LayerGroup, ...]

    @property
    def windows(self) -> tuple[Window, ...]:
        """Groups that are needed of the end of a prefix only."""
        return tuple(
            Window(
                group.object_group_id,
                group.window_tokens,
                -(-group.window_tokens // self.block_tokens),
                group.is_replayable,
            )
            for group in self.groups
            if group.window_tokens is not None
        )

    def everywhere(self, seen_groups: Iterable[int]) -> frozenset[int]:
        """Groups that are needed of every block: those of full attention, and reported ones that nobody explained."""
        told = {group.object_group_id for group in self.groups}
        full = {group.object_group_id for group in self.groups if group.window_tokens is None}
        return frozenset(full | (set(seen_groups) - told))
