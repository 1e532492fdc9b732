"""Which lmcache servers are there: registered, beating, or gone.

Silence is counted on a clock of our own that advances in small steps: a process that was stopped for a minute has
heard nobody and knows nothing. A server that is unknown is told so at its next beat and registers again. After a
restart of the index the servers whose DRAM copies were loaded are expected: they have the usual time to register.
docs/decisions/0016-deadlines-and-typed-failures.md
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MAX_STEP_S = 2.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server's own HTTP interface listens."""

    host: str
    http_port: int


@dataclass(slots=True)
class _Presence:
    address: Address | None  # None: expected, not registered
    heard_at_s: float
    shared_capacity_bytes: int = 0  # 0: it told none


class StoreInstances:
    """On one event loop."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._watch_s = 0.0
        self._known: dict[str, _Presence] = {}

    @property
    def registered_count(self) -> int:
        return sum(1 for presence in self._known.values() if presence.address is not None)

    def addresses(self) -> Mapping[str, Address]:
        """Where each registered server listens."""
        return {name: known.address for name, known in self._known.items() if known.address is not None}

    @property
    def shared_capacity_bytes(self) -> int | None:
        """Of the shared level, which all servers share; None when none of them told it."""
        return max((known.shared_capacity_bytes for known in self._known.values()), default=0) or None

    def capacity_of(self, instance_id: str) -> int:
        """Of the shared level, as this server told it; 0 when it did not."""
        known = self._known.get(instance_id)
        return known.shared_capacity_bytes if known else 0

    def tell_capacity(self, instance_id: str, shared_capacity_bytes: int) -> None:
        """What a server says of the shared level; kept until it is gone."""
        known = self._known.get(instance_id)
        if known is not None:
            known.shared_capacity_bytes = shared_capacity_bytes

    def expect(self, instance_ids: Iterable[str]) -> None:
        """Give servers of an earlier life of the index the time to register again."""
        for instance_id in instance_ids:
            self._known.setdefault(instance_id, _Presence(None, self._watch_s))

    def is_known(self, instance_id: str) -> bool:
        """Registered, or expected."""
        return instance_id in self._known

    def is_registered(self, instance_id: str) -> bool:
        known = self._known.get(instance_id)
        return known is not None and known.address is not None

    def address_of(self, instance_id: str) -> Address | None:
        """None when the server is not registered."""
        known = self._known.get(instance_id)
        return known.address if known else None

    def register(self, instance_id: str, address: Address) -> None:
        """The server is there, and has the usual time until its first beat."""
        capacity_bytes = self.capacity_of(instance_id)
        self._known[instance_id] = _Presence(address, self._watch_s, capacity_bytes)

    def beat(self, instance_id: str) -> bool:
        """Returns whether the server is registered."""
        presence = self._known.get(instance_id)
        if presence is None or presence.address is None:
            return False
        presence.heard_at_s = self._watch_s
        return True

    def deregister(self, instance_id: str) -> bool:
        """Returns whether the server was known."""
        return self._known.pop(instance_id, None) is not None

    def advance(self, elapsed_s: float) -> list[str]:
        """Time passed; forget and return the servers that are silent too long by now."""
        self._watch_s += min(elapsed_s, MAX_STEP_S)
        limit_s = self._watch_s - self._silence_s
        silent = [instance_id for instance_id, presence in self._known.items() if presence.heard_at_s < limit_s]
        for instance_id in silent:
            del self._known[instance_id]
        return silent
