"""What an operator may set for kvindex: ``SHOAL_KVINDEX_<FIELD>``."""

from typing import Self

from pydantic import Field, model_validator

from shoal_runtime.postgres import PostgresSettings
from shoal_runtime.settings import ServiceSettings

MINUTE_S = 60
DAY_S = 24 * 60 * MINUTE_S
LONGEST_S = 3650 * DAY_S


class KvIndexSettings(ServiceSettings):
    """Read once, in ``__main__``."""

    postgres: PostgresSettings = PostgresSettings()
    coordinator_port: int = Field(
        0, ge=0, le=65535, description="Port on which lmcache servers report; fixed, so that they find it; 0 takes any."
    )
    max_blocks: int = Field(
        10_000_000,
        ge=1,
        description="Blocks kept in memory, up to 150 bytes each; raise when evicted blocks show in metrics.",
    )
    recall_deadline_ms: float = Field(
        2.0,
        gt=0,
        le=1000,
        description="How long a match waits for Postgres when max_blocks was reached; raise for a slow Postgres.",
    )
    store_silence_s: float = Field(
        15.0, gt=0, le=600, description="Three heartbeats of the lmcache servers; raise it with theirs."
    )
    write_interval_s: float = Field(
        0.2, gt=0, le=60, description="Raise to write less often to Postgres; a crash forgets DRAM copies so far back."
    )
    max_pending_changes: int = Field(
        500_000,
        ge=1000,
        description="Changes that wait while Postgres is away, 300 bytes each; raise for long outages.",
    )
    max_waiters: int = Field(10_000, ge=1, description="Hand-offs that may wait for the store; raise with the fleet.")
    max_claims: int = Field(
        200_000, ge=1, description="Settled blocks whose report is awaited; raise when dropped claims show in metrics."
    )
    claim_wait_s: float = Field(60.0, gt=0, le=3600, description="Raise when reports trail requests by more.")
    max_pending_blocks: int = Field(
        200_000, ge=0, description="Blocks that requests compute now, for others to wait for; 250 bytes each."
    )
    recent_bytes: int = Field(
        67_108_864,
        ge=0,
        description="Memory of block hashes by request, to explain misses; raise to look further back.",
    )
    max_departures: int = Field(
        100_000, ge=1, description="Blocks of which is remembered how they went, to explain misses; 250 bytes each."
    )
    chat_lifetime_s: int = Field(7 * DAY_S, ge=1, le=LONGEST_S, description="Lower it for less disk and fewer hits.")
    agent_lifetime_s: int = Field(3 * DAY_S, ge=1, le=LONGEST_S, description="Lower it for less disk and fewer hits.")
    probe_lifetime_s: int = Field(10 * MINUTE_S, ge=1, le=LONGEST_S, description="Blocks of readiness checks.")
    unclaimed_lifetime_s: int = Field(DAY_S, ge=1, le=LONGEST_S, description="Stored blocks that no request claimed.")
    listing_interval_s: float = Field(
        DAY_S, ge=1, description="Each so often the stores are listed and compared, without any doubt; lower it to see."
    )
    sweep_interval_s: float = Field(
        30.0, gt=0, le=3600, description="Lower it when the shared level fills up faster than it is swept."
    )
    sweep_grace_s: float = Field(
        60.0, gt=0, le=3600, description="Between hiding a block and deleting it; raise when requests start slowly."
    )
    shared_capacity_bytes: int = Field(
        0, ge=0, description="Of the shared level; 0: as the lmcache servers tell. Set it when they tell none."
    )
    high_watermark: float = Field(
        0.9, gt=0, le=1, description="Share of the capacity above which blocks go before their time."
    )
    low_watermark: float = Field(
        0.8, gt=0, le=1, description="Down to which share they go; lower it for fewer, longer rounds."
    )

    @model_validator(mode="after")
    def _marks_are_in_order(self) -> Self:
        if self.low_watermark > self.high_watermark:
            raise ValueError("low_watermark must not be above high_watermark")
        return self
