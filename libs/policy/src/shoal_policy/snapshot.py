"""What the policies may know: read models of the fleet at one moment, made by the edge that watched it.

``None`` is unknown, never zero. No view knows how it was observed. docs/decisions/0016-deadlines-and-typed-failures.md
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeWorkerView:
    """One decode worker that may be given requests. Loads include what was placed since its last report."""

    instance_id: str
    running_requests: int | None = None
    max_running_requests: int | None = None
    cached_tokens: int | None = None  # total length of its running requests
    max_cached_tokens: int | None = None

    @property
    def is_load_known(self) -> bool:
        return self.running_requests is not None and self.cached_tokens is not None


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """How busy one gateway is."""

    running_requests: int
    waiting_requests: int
