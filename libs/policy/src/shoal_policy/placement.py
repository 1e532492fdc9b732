"""Which decode worker a request is offered to, best first.

A decode step takes time for every running request and for every cached token. A short request therefore goes
where few requests run, even if their caches are long; a long one goes where the total cached length is small.
The worker has the last word: an order is returned, not one name. docs/decisions/0005-decode-is-placed.md
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from shoal_policy.snapshot import DecodeWorkerView


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """``long_from_tokens``: from this length on a request is placed by cached length instead of by count."""

    long_from_tokens: int = 16_384

    def rank(self, request_tokens: int, request_id: str, workers: Iterable[DecodeWorkerView]) -> list[str]:
        """Instance ids of the workers with room. Those of unknown load come last: they may be full or idle."""
        with_room = [worker for worker in workers if _has_room(worker, request_tokens)]
        is_long = request_tokens >= self.long_from_tokens
        return [worker.instance_id for worker in sorted(with_room, key=lambda w: _order(w, is_long, request_id))]


def _has_room(worker: DecodeWorkerView, request_tokens: int) -> bool:
    running, most_running = worker.running_requests, worker.max_running_requests
    if running is not None and most_running is not None and running >= most_running:
        return False
    cached, most_cached = worker.cached_tokens, worker.max_cached_tokens
    if cached is not None and most_cached is not None and running:
        # A worker with nothing running is always offered the request: only it knows whether it can ever fit.
        return cached + request_tokens <= most_cached
    return True


def _order(worker: DecodeWorkerView, is_long: bool, request_id: str) -> tuple[bool, int, int, int]:
    running, cached = worker.running_requests or 0, worker.cached_tokens or 0
    first, second = (cached, running) if is_long else (running, cached)
    # Equal loads are the usual case in an idle fleet; a stable spread keeps gateways from choosing alike.
    spread = zlib.crc32(f"{request_id}/{worker.instance_id}".encode())
    return (not worker.is_load_known, first, second, spread)
