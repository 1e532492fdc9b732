"""Settings of a decode worker, ``SHOAL_DECODE_<FIELD>``; those of its engine stand in ``shoal_engine.settings``."""

from pydantic import Field

from shoal_runtime.settings import ServiceSettings


class DecodeSettings(ServiceSettings):
    """What a decode worker takes on, and how it watches its engine."""

    max_running_requests: int | None = Field(
        None, ge=1, le=4096, description="Absent: the engine's own limit. Lower it to keep steps short."
    )
    max_local_prefill_tokens: int = Field(
        16_384, ge=0, description="Prompt tokens computed here at one time without a prefill worker. 0 refuses them."
    )
    max_unread_tokens: int = Field(
        4096, ge=16, description="Tokens of one request that may wait for its gateway; beyond, that request ends."
    )
    check_each_s: float = Field(1.0, gt=0, le=60, description="How soon a dead engine is seen.")
