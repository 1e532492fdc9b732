"""How long a step and a load take: pure functions of load, in the spirit of a measured engine's curve.

Everything is zero by default, which makes the engine as fast as the loop. Randomness is handed in as ``noise``, a
factor on every duration, so that a simulation can be repeated.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


def _exactly() -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one engine."""

    prefill_tokens_per_s: float = math.inf
    base_step_s: float = 0.0
    step_s_per_request: float = 0.0
    step_s_per_cached_token: float = 0.0
    load_bytes_per_s: float = math.inf
    noise: Callable[[], float] = _exactly

    def step_s(self, prompt_tokens: int, running_requests: int, cached_tokens: int) -> float:
        """One step that computes ``prompt_tokens`` of prompts and one token for each running request."""
        return self.noise() * (
            self.base_step_s
            + self.step_s_per_request * running_requests
            + self.step_s_per_cached_token * cached_tokens
            + prompt_tokens / self.prefill_tokens_per_s
        )

    def load_s(self, size_bytes: int) -> float:
        """Moving ``size_bytes`` from the store into the engine."""
        return self.noise() * size_bytes / self.load_bytes_per_s
