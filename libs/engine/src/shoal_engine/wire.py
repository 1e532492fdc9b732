"""What every worker's edge reads and tells alike: sampling and items of a message, and the groups of its engine.

docs/decisions/0001-nats-distributes-grpc-answers.md
"""

import math
from collections.abc import Iterable

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1 import common_pb2 as pb
from shoal_engine.api import Item, Sampling, StateGroup, StateKind
from shoal_runtime.presence import ServedGroup

_PLAIN_FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
)


def to_sampling(message: pb.Sampling) -> Sampling:
    """Absent stays None: the model's own default. BadRequest for numbers that are none."""
    plain = {name: getattr(message, name) for name in _PLAIN_FIELDS if message.HasField(name)}  # type: ignore[arg-type]
    if not all(math.isfinite(value) for value in (*plain.values(), *message.logit_bias.values())):
        raise BadRequest(pb.INVALID_REQUEST, "sampling must hold finite numbers", param="sampling")
    return Sampling(
        **plain,
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        ignore_eos=message.ignore_eos,
        constraint=message.constraint if message.HasField("constraint") else None,
    )


def to_items(messages: Iterable[pb.Item]) -> tuple[Item, ...]:
    return tuple(Item(item.offset_tokens, item.length_tokens, item.identifier) for item in messages)


def to_served(groups: Iterable[StateGroup]) -> tuple[ServedGroup, ...]:
    """What a hit needs of each group, as presence tells it."""
    return tuple(
        ServedGroup(
            group.object_group_id,
            group.window_tokens if group.kind is StateKind.SLIDING_WINDOW else None,
            group.is_replayable,
        )
        for group in groups
    )
