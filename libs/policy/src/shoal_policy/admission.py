"""Whether a request may start now, has to wait, or is refused.

Running and waiting requests are both bounded, so an overload shows as a quick refusal and never as a hang.
"""

import enum
from dataclasses import dataclass

from shoal_policy.snapshot import AdmissionView


class AdmissionVerdict(enum.Enum):
    """What happens to the request that asks."""

    ADMIT = "admit"
    WAIT = "wait"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Bounds of one gateway."""

    max_running_requests: int
    max_waiting_requests: int

    def decide(self, view: AdmissionView) -> AdmissionVerdict:
        """A request never overtakes one that waits."""
        if view.waiting_requests == 0 and view.running_requests < self.max_running_requests:
            return AdmissionVerdict.ADMIT
        if view.waiting_requests < self.max_waiting_requests:
            return AdmissionVerdict.WAIT
        return AdmissionVerdict.REFUSE
