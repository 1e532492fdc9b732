"""What the engines say of the groups of their pools, out of their presence, for the directory.

A layout outlives the workers that told it: what they stored is still there.
docs/decisions/0011-state-kinds-have-their-own-policy.md
"""

from shoal_contracts.v1 import fleet_pb2
from shoal_kvindex.directory import Directory
from shoal_kvindex.kinds import LayerGroup, PoolLayout
from shoal_runtime.presence import Fleet, Served

ROLES = (fleet_pb2.PREFILL, fleet_pb2.DECODE)


def tell_layouts(fleet: Fleet, directory: Directory) -> None:
    """Call it after each change of the fleet."""
    for role in ROLES:
        for member in fleet.live(role):
            if member.model is not None and (layout := layout_of(member.model)) is not None:
                directory.set_layout(member.model.pool, layout)


def layout_of(served: Served) -> PoolLayout | None:
    """None when the worker does not say."""
    if not served.pool or not served.block_tokens or not served.groups:
        return None
    groups = (LayerGroup(group.object_group_id, group.window_tokens, group.is_replayable) for group in served.groups)
    return PoolLayout(served.block_tokens, tuple(groups))
