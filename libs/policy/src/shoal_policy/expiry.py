"""Until when a stored block is kept: the latest of what its uses asked for.

Agents come back within days or never, people within a week; a probe's blocks only have to outlive the probe.
Renewing writes to the directory, so it is worth it only when it gains a noticeable part of the lifetime.
docs/decisions/0010-expiry-follows-the-traffic-class.md
"""

import enum
from dataclasses import dataclass

DAY_S = 86_400.0


class TrafficClass(enum.Enum):
    """Which use a request makes of the store."""

    CHAT = "chat"
    AGENT = "agent"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class ExpiryPolicy:
    """Lifetimes by traffic class, and the share of a lifetime that a renewal must gain to be written."""

    chat_s: float = 7 * DAY_S
    agent_s: float = 3 * DAY_S
    probe_s: float = 600.0
    renewal_gain: float = 0.1

    def lifetime_s(self, traffic_class: TrafficClass) -> float:
        """How long after a use of this class a block stays."""
        return {
            TrafficClass.CHAT: self.chat_s,
            TrafficClass.AGENT: self.agent_s,
            TrafficClass.PROBE: self.probe_s,
        }[traffic_class]

    def renew(self, expires_at_s: float | None, now_s: float, traffic_class: TrafficClass) -> float | None:
        """The new expiry after a use at ``now_s``; None when the present one is kept as it is.

        ``expires_at_s`` is None for a block that nobody claimed yet.
        """
        lifetime_s = self.lifetime_s(traffic_class)
        asked_s = now_s + lifetime_s
        if expires_at_s is None:
            return asked_s
        return asked_s if asked_s - expires_at_s > self.renewal_gain * lifetime_s else None
