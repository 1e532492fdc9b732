"""Which blocks of a stored prefix have been lost: the files between others that were there before.

A lookup asks for every block of a prompt, and the ones behind its stored prefix are missing as a matter of course.
Lost are those with an older file behind them: blocks are stored from the first one on. A run that is being stored
right now shows holes too, so only a file that has been there for a while proves anything. Groups of layers with a
sliding window keep only the last blocks of a run: their holes are meant.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from lmcache.v1.distributed.api import ObjectKey

SETTLED_S = 10.0  # far more than a run of blocks takes to be written, and than the clocks of two nodes differ
MAX_TOLD = 100_000


class Holes:
    """Finds each hole once: a block that stays in DRAM is not stored again and shows its hole at every lookup.

    Any thread may call. Past ``MAX_TOLD`` the holes found first may be found once more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: OrderedDict[ObjectKey, None] = OrderedDict()
        self.is_windowed: Callable[[ObjectKey], bool] = lambda key: False

    def found(self, keys: Sequence[ObjectKey], written_at: Sequence[float | None], now: float) -> list[ObjectKey]:
        """The lost blocks of a lookup that were not found lost before. ``written_at`` is None where no file is."""
        holes = [keys[place] for place in lost_places(keys, written_at, now)]
        return [key for key in holes if not self.is_windowed(key) and self._is_first(key)]

    def filled(self, keys: Iterable[ObjectKey]) -> None:
        """These are stored again."""
        with self._lock:
            for key in keys:
                self._told.pop(key, None)

    def _is_first(self, key: ObjectKey) -> bool:
        with self._lock:
            if key in self._told:
                return False
            self._told[key] = None
            if len(self._told) > MAX_TOLD:
                self._told.popitem(last=False)
            return True


def lost_places(keys: Sequence[ObjectKey], written_at: Sequence[float | None], now: float) -> list[int]:
    """Places in ``keys`` of the blocks of the first hole of each run (blocks of one group, rank, pool and salt)."""
    lost: list[int] = []
    for _, places in groupby(range(len(keys)), key=lambda place: _run(keys[place])):
        lost.extend(_first_hole([(place, written_at[place]) for place in places], now))
    return lost


def _run(key: ObjectKey) -> tuple[str, str, int, int]:
    return key.model_name, key.cache_salt, key.object_group_id, key.kv_rank


def _first_hole(run: list[tuple[int, float | None]], now: float) -> Iterator[int]:
    missing: list[int] = []
    for place, written in run:
        if written is None:
            missing.append(place)
        elif missing:
            if now - written >= SETTLED_S:
                yield from missing
            return
