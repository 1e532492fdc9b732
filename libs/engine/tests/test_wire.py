"""Sampling and items as they come from the wire, and the groups of an engine as they go there."""

import pytest

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1 import common_pb2 as pb
from shoal_engine.api import Item, Sampling, StateGroup, StateKind
from shoal_engine.wire import to_items, to_sampling, to_served
from shoal_runtime.presence import ServedGroup


def test_absent_sampling_is_the_models_own_and_zero_is_a_value() -> None:
    assert to_sampling(pb.Sampling()) == Sampling()
    assert to_sampling(pb.Sampling(logprobs=0, temperature=0)) == Sampling(logprobs=0, temperature=0)


@pytest.mark.parametrize("message", [pb.Sampling(temperature=float("nan")), pb.Sampling(logit_bias={3: float("inf")})])
def test_numbers_that_are_none_are_refused(message: pb.Sampling) -> None:
    with pytest.raises(BadRequest, match="finite"):
        to_sampling(message)


def test_items_keep_their_place_and_their_identity() -> None:
    assert to_items([pb.Item(offset_tokens=2, length_tokens=3, identifier="image")]) == (Item(2, 3, "image"),)


def test_a_window_is_told_with_its_length_and_full_attention_without() -> None:
    groups = (
        StateGroup(0, StateKind.FULL),
        StateGroup(1, StateKind.SLIDING_WINDOW, 256),
        StateGroup(2, StateKind.SLIDING_WINDOW, 128, is_replayable=True),
    )
    assert to_served(groups) == (ServedGroup(0), ServedGroup(1, 256), ServedGroup(2, 128, True))
