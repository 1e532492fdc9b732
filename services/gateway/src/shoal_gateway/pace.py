"""How fast prompts are computed, by pool: measured on every prefill job of this gateway, forgotten with it."""

from collections import OrderedDict

from shoal_policy import UNKNOWN_PACE, PrefillPace

MAX_POOLS = 64


class PrefillPaces:
    """On one event loop."""

    def __init__(self) -> None:
        self._paces: OrderedDict[str, PrefillPace] = OrderedDict()

    def of(self, pool: str) -> PrefillPace:
        return self._paces.get(pool, UNKNOWN_PACE)

    def record(self, pool: str, miss_tokens: int, compute_s: float, overhead_s: float) -> None:
        """A job was answered. ``overhead_s`` is all that was not computing. Nothing when nothing was computed."""
        if miss_tokens <= 0:
            return
        self._paces[pool] = self.of(pool).after(miss_tokens, compute_s, overhead_s)
        self._paces.move_to_end(pool)
        if len(self._paces) > MAX_POOLS:
            self._paces.popitem(last=False)
