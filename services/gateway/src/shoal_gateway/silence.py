"""Peers that did not answer of late, or broke a connection, are asked last, for a while.

Presence tells who lives; only a call shows who serves. Without this a worker that beats and answers nothing would look
idle, be asked first, and cost every request its time-out.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from shoal_gateway.metrics import PUT_ASIDE
from shoal_runtime.clock import Clock

ASIDE_S = 10.0

Peer = TypeVar("Peer")


class SilentPeers:
    """Of one role, by its name in metrics; used on one event loop."""

    def __init__(self, role: str, clock: Clock) -> None:
        self._role = role
        self._clock = clock
        self._until_s: dict[str, float] = {}

    def note(self, instance_id: str) -> None:
        """It let a deadline pass, or its connection broke."""
        now_s = self._clock.monotonic()
        self._until_s = {name: until_s for name, until_s in self._until_s.items() if until_s > now_s}
        self._until_s[instance_id] = now_s + ASIDE_S
        PUT_ASIDE.labels(self._role).inc()

    def last(self, peers: Iterable[Peer], name: Callable[[Peer], str]) -> list[Peer]:
        """The same order, but for those: they come behind all others."""
        now_s = self._clock.monotonic()
        return sorted(peers, key=lambda peer: self._until_s.get(name(peer), 0.0) > now_s)
