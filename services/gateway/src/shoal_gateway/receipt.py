"""The route receipt: what happened to one request, in the log, in metrics and on demand in the response.

Filled by the steps as they go; absent values are unknown. It names instances and counts, never prompt text.
docs/decisions/0015-nothing-falls-back-in-silence.md
"""

import json
from dataclasses import dataclass, field
from typing import Any

from shoal_gateway.ports import Fallback


@dataclass(slots=True)
class SharedPart:
    """Stage 3, when another request had the same prefix computed: whose, how long this one waited, how that ended."""

    request_id: str
    waited_ms: int | None = None
    outcome: str | None = None


@dataclass(slots=True)
class PrefillPart:
    """Stage 4. ``queue_ms`` is what is neither computing nor waiting for the store.

    ``prefetched_blocks`` of the hit came into the worker's DRAM while the job waited for its turn in the engine, in
    ``prefetch_ms`` that the engine did not spend; absent when nothing was prefetched.
    """

    instance_id: str | None = None
    attempts: int = 0
    deliveries: int | None = None
    queue_ms: int | None = None
    compute_ms: int | None = None
    store_wait_ms: int | None = None
    stored: str | None = None
    prefetched_blocks: int | None = None
    prefetch_ms: int | None = None


@dataclass(slots=True)
class DecodePart:
    """Stage 5. ``attempts`` counts offers that were made, refused ones included."""

    instance_id: str | None = None
    attempts: int = 0
    hit_tokens: int | None = None


@dataclass(slots=True)
class Receipt:
    """One per request, owned by its Lifecycle."""

    request_id: str
    model: str | None = None
    pool: str | None = None
    tier: str | None = None
    prompt_tokens: int | None = None
    matched_tokens: int | None = None
    hit_tokens: int | None = None
    completion_tokens: int | None = None
    shared: SharedPart | None = None
    prefill: PrefillPart | None = None
    decode: DecodePart = field(default_factory=DecodePart)
    fallbacks: list[Fallback] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was changed of the request, or has no effect here
    diverged_at_token: int | None = None
    stage: str = "admission"  # the part that has the request now, or had it when it ended
    outcome: str | None = None
    error: str | None = None
    ttft_ms: int | None = None
    total_ms: int | None = None
    # For the check of its accounts, not shown.
    tokens_not_shown: int = 0
    is_settled: bool = False

    def note(self, fallback: Fallback) -> None:
        """Something did not go the way it should."""
        self.fallbacks.append(fallback)

    @property
    def miss_tokens(self) -> int | None:
        """Prompt tokens that were computed for this request."""
        if self.prompt_tokens is None or self.hit_tokens is None:
            return None
        return self.prompt_tokens - self.hit_tokens

    def fields(self) -> dict[str, Any]:
        """Every known value, in the order of the river."""
        flat: dict[str, Any] = {
            "request_id": self.request_id,
            "outcome": self.outcome,
            "error": self.error,
            "stage": self.stage if self.outcome != "finished" else None,
            "model": self.model,
            "pool": self.pool,
            "tier": self.tier,
            "prompt_tokens": self.prompt_tokens,
            "matched_tokens": self.matched_tokens,
            "hit_tokens": self.hit_tokens,
            "miss_tokens": self.miss_tokens,
            "completion_tokens": self.completion_tokens,
            "shared": _known(self.shared) if self.shared else None,
            "prefill": _known(self.prefill) if self.prefill else None,
            "decode": _known(self.decode),
            "diverged_at_token": self.diverged_at_token,
            "ttft_ms": self.ttft_ms,
            "total_ms": self.total_ms,
        }
        known = {key: value for key, value in flat.items() if value is not None}
        if self.notes:
            known["notes"] = self.notes
        return {**known, "fallbacks": [fallback.value for fallback in self.fallbacks]}

    def to_json(self) -> bytes:
        return json.dumps(self.fields(), separators=(",", ":")).encode()


def _known(part: SharedPart | PrefillPart | DecodePart) -> dict[str, Any]:
    values = {name: getattr(part, name) for name in part.__slots__}
    return {name: value for name, value in values.items() if value is not None}
