"""Decides whether this worker takes a placement, by what it already runs.

A pure function of limits and occupancy: the same call answers the gateway and the simulator. A worker refuses
rather than queues, because a request that waits in the gateway can still go elsewhere.
docs/decisions/0005-decode-is-placed.md
"""

import enum
from dataclasses import dataclass


class Refusal(enum.Enum):
    """Why a placement is not taken; also the label of the metric."""

    LEAVING = "leaving"  # draining, or the engine is dead
    OTHER_POOL = "other_pool"
    TOO_LONG = "too_long"  # for the context of the model: no worker of the pool will take it
    TOO_MANY_REQUESTS = "too_many_requests"
    NO_ROOM = "no_room"  # in KV memory
    NO_LOCAL_PREFILL = "no_local_prefill"  # enough prompts are being computed here


@dataclass(frozen=True, slots=True)
class Limits:
    """What this worker can hold; fixed after the start."""

    pool: str
    max_context_tokens: int
    max_running_requests: int
    max_cached_tokens: int
    max_local_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What this worker holds now. ``cached_tokens`` is the length of running requests, prompt and answer."""

    running_requests: int = 0
    cached_tokens: int = 0
    local_prefill_tokens: int = 0  # prompts that are computed here and have no first token yet
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """What a placement needs; ``tokens`` are prompt and resumed ones."""

    pool: str
    tokens: int
    is_local_prefill: bool


def judge(asked: Asked, occupancy: Occupancy, limits: Limits) -> Refusal | None:
    """None: taken. Reasons that hold on every worker come before those that another worker may not have."""
    if asked.pool != limits.pool:
        return Refusal.OTHER_POOL
    if asked.tokens >= limits.max_context_tokens:
        return Refusal.TOO_LONG
    if occupancy.is_leaving:
        return Refusal.LEAVING
    if occupancy.running_requests >= limits.max_running_requests:
        return Refusal.TOO_MANY_REQUESTS
    if occupancy.cached_tokens + asked.tokens >= limits.max_cached_tokens:
        return Refusal.NO_ROOM
    if asked.is_local_prefill and not _has_prefill_room(asked.tokens, occupancy, limits):
        return Refusal.NO_LOCAL_PREFILL
    return None


def _has_prefill_room(tokens: int, occupancy: Occupancy, limits: Limits) -> bool:
    """A prompt larger than the whole allowance is taken when it is alone: otherwise nobody ever would."""
    if limits.max_local_prefill_tokens == 0:
        return False
    is_alone = occupancy.local_prefill_tokens == 0
    return is_alone or occupancy.local_prefill_tokens + tokens <= limits.max_local_prefill_tokens
