"""The groups that an engine announces are the ones LMCache numbers."""

from dataclasses import dataclass

import pytest

from shoal_engine.api import StateGroup, StateKind
from shoal_engine.vllm.state_groups import from_rows, state_groups, to_rows

FULL, WINDOW = StateKind.FULL, StateKind.SLIDING_WINDOW


@dataclass(frozen=True)
class AKernelGroup:
    sw_size_tokens: int = -1
    recurrent_state: bool = False


def test_full_attention_is_one_group_however_it_is_copied() -> None:
    assert state_groups([AKernelGroup(), AKernelGroup()], 128) == (StateGroup(0, FULL),)


def test_groups_are_numbered_in_the_order_of_their_first_layers() -> None:
    kernel_groups = [AKernelGroup(256), AKernelGroup(), AKernelGroup(256), AKernelGroup(1024)]
    assert state_groups(kernel_groups, 128) == (
        StateGroup(0, WINDOW, 256),
        StateGroup(1, FULL),
        StateGroup(2, WINDOW, 1024),
    )


def test_windows_of_equally_many_blocks_are_one_group_of_the_longer() -> None:
    assert state_groups([AKernelGroup(200), AKernelGroup(256)], 128) == (StateGroup(0, WINDOW, 256),)


def test_recurrent_state_never_shares_a_group_with_a_window() -> None:
    kernel_groups = [AKernelGroup(128), AKernelGroup(128, recurrent_state=True)]
    assert state_groups(kernel_groups, 128) == (StateGroup(0, WINDOW, 128), StateGroup(1, WINDOW, 128))


def test_a_window_that_the_engine_rebuilds_stands_behind_what_is_stored() -> None:
    assert state_groups([AKernelGroup()], 256, replay_tokens=128) == (
        StateGroup(0, FULL),
        StateGroup(1, WINDOW, 128, is_replayable=True),
    )


@pytest.mark.parametrize("replay_tokens", [0, 128])
def test_groups_survive_the_way_between_vllms_processes(replay_tokens: int) -> None:
    groups = state_groups([AKernelGroup(256), AKernelGroup()], 128, replay_tokens)
    assert from_rows(to_rows(groups)) == groups
