"""Remembers which objects of a place changed while somebody looks: a listing must not overrule what is newer.

Told of every change by whoever applies the log, in its order, on every instance; remembers only for recordings that
are open. A listing is a picture taken over seconds, and reports trail the store by up to a second, so what a report
names during a recording is believed as reported.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from shoal_kvindex.names import ObjectKey, Place

MAX_RECORDED = 500_000  # 64 MB; a shard's listing takes seconds, so only a flood reaches it


class Recording:
    """What changed at ``place``, by the first byte of the hash: the object's size, or None when it was deleted."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.is_void = False  # its copies were dropped, or too much changed: nothing may be concluded
        self._changed: dict[int, dict[ObjectKey, int | None]] = defaultdict(dict)
        self._count = 0

    def has(self, key: ObjectKey) -> bool:
        """Whether a report named it."""
        return key in self._changed[key.block_hash[0]]

    def overruled(
        self, found: Sequence[tuple[ObjectKey, int]], gone: Sequence[ObjectKey]
    ) -> tuple[list[tuple[ObjectKey, int]], list[ObjectKey]]:
        """What a correction said against a report that came while it was on its way, as the next correction. Reports
        about these objects are remembered anew from here on."""
        words = {key: self._changed[key.block_hash[0]].pop(key) for key in self._reported(found, gone)}
        self._count -= len(words)
        again = [(key, size_bytes) for key in gone if (size_bytes := words.get(key)) is not None]
        return again, [key for key, _ in found if key in words and words[key] is None]

    def forget_up_to(self, shard: int) -> None:
        """These are done with."""
        self._forget([changed for changed in self._changed if changed <= shard])

    def forget_after(self, shard: int) -> None:
        """These are looked at from this moment on."""
        self._forget([changed for changed in self._changed if changed > shard])

    def note(self, key: ObjectKey, size_bytes: int | None) -> None:
        """A report names this object."""
        changed = self._changed[key.block_hash[0]]
        self._count += key not in changed
        changed[key] = size_bytes
        self.is_void |= self._count > MAX_RECORDED

    def _reported(self, found: Sequence[tuple[ObjectKey, int]], gone: Sequence[ObjectKey]) -> list[ObjectKey]:
        keys = [*(key for key, _ in found), *gone]
        return [key for key in keys if self.has(key)]

    def _forget(self, shards: Iterable[int]) -> None:
        for shard in shards:
            self._count -= len(self._changed.pop(shard))


class ChangeRecorder:
    """One an instance; on the loop that applies changes. Without open recordings it costs one test a report."""

    def __init__(self) -> None:
        self._recordings: list[Recording] = []

    @contextmanager
    def recording(self, place: Place) -> Iterator[Recording]:
        """From now on until the context ends."""
        recording = Recording(place)
        self._recordings.append(recording)
        try:
            yield recording
        finally:
            self._recordings.remove(recording)

    def stored(self, key: ObjectKey, place: Place, size_bytes: int) -> None:
        for recording in self._recordings:
            if recording.place == place:
                recording.note(key, size_bytes)

    def deleted(self, key: ObjectKey, place: Place) -> None:
        for recording in self._recordings:
            if recording.place == place:
                recording.note(key, None)

    def dropped(self, place: Place) -> None:
        """All copies there were dropped."""
        for recording in self._recordings:
            recording.is_void |= recording.place == place
