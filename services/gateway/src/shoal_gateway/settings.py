"""What an operator may set for the gateway; every value has a default that suits one machine."""

from typing import Literal

from pydantic import Field, field_validator

from shoal_policy import parse_tiers
from shoal_runtime.postgres import PostgresSettings
from shoal_runtime.settings import EnvironmentSettings, ServiceSettings


class ResponseSettings(EnvironmentSettings):
    """Stored responses."""

    retention_days: float = Field(
        30.0, gt=0, le=3650, description="How long stored responses can be read; lower it for less disk."
    )


class GatewaySettings(ServiceSettings):
    """``SHOAL_GATEWAY_<FIELD>``."""

    postgres: PostgresSettings = PostgresSettings()
    response: ResponseSettings = ResponseSettings()
    port: int = Field(8000, ge=0, le=65535, description="Port of the public API; 0 takes a free one.")
    max_body_bytes: int = Field(8_000_000, ge=1024, description="Raise for prompts with many images; bounds memory.")
    body_wait_s: float = Field(30.0, gt=0, le=600, description="Raise for clients on slow links that send much.")
    max_running_requests: int = Field(256, ge=1, description="Raise when workers idle while the gateway refuses.")
    max_waiting_requests: int = Field(256, ge=0, description="Requests that may wait for one of those to end.")
    admission_wait_s: float = Field(10.0, gt=0, le=600, description="How long they wait before they are refused.")
    request_budget_s: float = Field(900.0, gt=0, le=86_400, description="Raise when answers take longer than this.")
    match_s: float = Field(0.25, gt=0, le=10, description="After this an unanswered Match counts as unknown.")
    handoff_level: Literal["any", "l1", "l2"] = Field(
        "l2", description="Where a shared prefix must be before its waiters go on; as the prefill workers' own."
    )
    encode_s: float = Field(10.0, gt=0, le=120, description="Raise for very long prompts on slow machines.")
    tiers: str = Field("all", description="Prefill tiers with exclusive upper bounds: short:16384,all")
    prefill_attempts: int = Field(2, ge=1, le=5, description="Times a prefill job is queued before decode computes.")
    prefill_answer_s: float = Field(
        120.0, gt=0, le=3600, description="Longest wait for one attempt, queue included; lower on fast machines."
    )
    accept_s: float = Field(2.0, gt=0, le=60, description="A decode worker that says nothing for this long is passed.")
    place_wait_s: float = Field(15.0, ge=0, le=600, description="How long a request waits while every worker is full.")
    place_attempts: int = Field(3, ge=1, le=10, description="Decode workers that one request may lose.")
    event_attempts: int = Field(3, ge=1, le=10, description="Tokenizers that one request may lose.")
    event_wait_s: float = Field(
        10.0, ge=0, le=600, description="How long an answer whose tokenizer was lost waits for another one."
    )
    long_from_tokens: int = Field(16_384, ge=1, description="Requests of this length are placed by cached length.")
    head_wait_s: float = Field(5.0, gt=0, le=60, description="Longest wait of response headers for the first event.")
    keep_alive_s: float = Field(15.0, gt=0, le=600, description="Lower when a proxy cuts silent streams earlier.")
    max_pending_bytes: int = Field(1_048_576, ge=4096, description="Events that may wait for one slow client.")
    answer_memory_bytes: int = Field(16_777_216, ge=0, description="Room to tell where a next turn diverges.")
    probe_keep_s: float = Field(
        30.0, ge=0, le=600, description="How long /readyz shows one probe's result; each new probe stores a block."
    )
    probe_s: float = Field(30.0, gt=0, le=600, description="Longest a probe may take; raise on slow machines.")

    @field_validator("tiers")
    @classmethod
    def _check_tiers(cls, text: str) -> str:
        parse_tiers(text)
        return text
