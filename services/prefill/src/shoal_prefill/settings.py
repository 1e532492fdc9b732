"""Settings of a prefill worker, ``SHOAL_PREFILL_<FIELD>``; those of its engine stand in ``shoal_engine.settings``."""

from typing import Literal

from pydantic import Field

from shoal_runtime.settings import ServiceSettings


class PrefillSettings(ServiceSettings):
    """Which jobs a prefill worker takes, and how long it waits for the store."""

    tiers: tuple[str, ...] = Field(("all",), min_length=1, description="Prompt-length classes that this worker serves.")
    handoff_level: Literal["any", "l1", "l2"] = Field(
        "l2", description="Where a block must be before the job is answered; any or l1 only when all run on one node."
    )
    handoff_wait_ms: int = Field(
        500, ge=0, le=10_000, description="Raise for a slow store; when it passes, decode computes what it misses."
    )
    max_deliveries: int = Field(
        5, ge=1, le=100, description="Deliveries of one job before it is given up; each crash or drain costs one."
    )
    check_each_s: float = Field(1.0, gt=0, le=60, description="How soon a dead engine is seen.")
