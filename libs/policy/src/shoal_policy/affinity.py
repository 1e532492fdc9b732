"""How long a request waits for another one that computes the same prefix, and how long such a computation is believed.

    computing n tokens takes   t(n) = n / tokens_per_s + overhead_s
    longest wait               min(1.5 * t(shared tokens), max_wait_s)
    a claim is believed        min(2 * t(miss tokens) + 1 s, max_claim_s)

``tokens_per_s`` and ``overhead_s`` (queue and hand-off) are the means of the prefill jobs of late; older ones weigh
less. Jobs of one length differ by about half, because they share their worker: so a wait lasts at most as long as
computing may take, and does not end, all for nothing, just before the blocks come. A claim is believed for longer than
anybody waits: one that lapses early makes everybody compute, one that is left over makes each wait only once.
docs/decisions/0012-one-computation-for-one-prefix.md
"""

from dataclasses import dataclass

KEPT_SHARE = 0.9  # what each job leaves of the weight of those before it
SPREAD_FACTOR = 1.5
CLAIM_FACTOR = 2.0
CLAIM_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """What computing took of late, in sums that fade: a job counts by its length, so short ones do not decide."""

    tokens: float = 0.0
    compute_s: float = 0.0
    overhead_s: float = 0.0
    jobs: float = 0.0

    def after(self, tokens: int, compute_s: float, overhead_s: float) -> "PrefillPace":
        """The pace with one more job in it."""
        return PrefillPace(
            KEPT_SHARE * self.tokens + tokens,
            KEPT_SHARE * self.compute_s + compute_s,
            KEPT_SHARE * self.overhead_s + overhead_s,
            KEPT_SHARE * self.jobs + 1,
        )


UNKNOWN_PACE = PrefillPace()


@dataclass(frozen=True, slots=True)
class AffinityPolicy:
    """``assumed_tokens_per_s`` holds until a job was measured."""

    max_wait_s: float = 30.0
    max_claim_s: float = 120.0
    assumed_tokens_per_s: float = 2000.0

    def compute_s(self, tokens: int, pace: PrefillPace) -> float:
        """How long computing this much takes on the average, from the queue to the store."""
        if not pace.jobs:
            return tokens / self.assumed_tokens_per_s
        return tokens * pace.compute_s / pace.tokens + pace.overhead_s / pace.jobs

    def wait_s(self, shared_tokens: int, pace: PrefillPace) -> float:
        """How long to wait at most for so many tokens that somebody else computes."""
        return min(SPREAD_FACTOR * self.compute_s(shared_tokens, pace), self.max_wait_s)

    def claim_s(self, miss_tokens: int, pace: PrefillPace) -> float:
        """How long others may believe that this request has so many tokens computed."""
        return min(CLAIM_FACTOR * self.compute_s(miss_tokens, pace) + CLAIM_GRACE_S, self.max_claim_s)
