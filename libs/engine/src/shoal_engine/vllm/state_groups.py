"""Which groups of layers a vLLM engine keeps in the store, and what a hit needs of each.

LMCache cuts an object for each of vLLM's KV groups into object groups: those that look back equally many blocks are
one, numbered in the order of the layers (its server must run with ``--separate-object-groups``; without windows there
is one group either way). A group that vLLM rebuilds by itself after a hit never reaches the store; it is told under
the next number, so that a hit needs nothing of it and its replay is known. docs/decisions/0011
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from shoal_engine.api import StateGroup, StateKind

DESCRIBE = "describe_state_groups"


class KernelGroup(Protocol):
    """Of LMCache's ``EngineGroupInfo``: layers that are copied together, in the order LMCache numbers them."""

    @property
    def sw_size_tokens(self) -> int:
        """-1: full attention."""

    @property
    def recurrent_state(self) -> bool:
        """State that is a snapshot, not attention."""


class StateGroupsOfWorker:
    """Mixed into vLLM's worker; asked through ``collective_rpc`` once the KV memory is registered."""

    def describe_state_groups(self) -> list[list[int]]:
        from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return []
        connector = get_kv_transfer_group()
        store = getattr(connector, "sub_connectors", [connector])[-1]  # beside NIXL it is the last one
        return to_rows(store.state_groups())


def state_groups(
    kernel_groups: Sequence[KernelGroup], block_tokens: int, replay_tokens: int = 0
) -> tuple[StateGroup, ...]:
    """As LMCache numbers them; ``replay_tokens`` is the window that vLLM rebuilds itself, 0 when it has none."""
    windows: dict[tuple[bool, int], int] = {}
    for group in kernel_groups:
        window_tokens = max(group.sw_size_tokens, 0)
        look_back = (group.recurrent_state, -(-window_tokens // block_tokens))
        windows[look_back] = max(windows.get(look_back, 0), window_tokens)
    groups = [_group(number, window_tokens) for number, window_tokens in enumerate(windows.values())]
    if replay_tokens:
        groups.append(StateGroup(len(groups), StateKind.SLIDING_WINDOW, replay_tokens, is_replayable=True))
    return tuple(groups)


def to_rows(groups: Iterable[StateGroup]) -> list[list[int]]:
    """Between vLLM's processes only plain values travel."""
    return [[group.object_group_id, group.window_tokens, group.is_replayable] for group in groups]


def from_rows(rows: Iterable[Sequence[Any]]) -> tuple[StateGroup, ...]:
    """The inverse of ``to_rows``."""
    return tuple(
        StateGroup(
            int(number),
            StateKind.SLIDING_WINDOW if window_tokens else StateKind.FULL,
            int(window_tokens),
            is_replayable=bool(is_replayable),
        )
        for number, window_tokens, is_replayable in rows
    )


def _group(number: int, window_tokens: int) -> StateGroup:
    kind = StateKind.SLIDING_WINDOW if window_tokens else StateKind.FULL
    return StateGroup(number, kind, window_tokens)
