"""Which objects of an `lmcache server` go to the shared level, and how long window objects stay in its DRAM.

Objects of full attention go to the shared level and leave DRAM only as LMCache's own eviction says. Objects of a
sliding window (or of recurrent state, which is a window of one block) stay in DRAM until nobody hit them for
``window_age_s``; of these the shared level gets the last window of each stored run, and any window that a hit went on
from: what follows such a hit may be shorter than a window, and without the blocks before it LMCache's hit is zero.

Which object groups are windows, and how long, engines tell LMCache when they register; it is remembered per pool,
because an engine may leave before its last blocks are written. What is not known is treated as full attention.

Callbacks come from LMCache's threads, most of them inside its lock: they only look things up and enqueue. The age
limit deletes through LMCache without force, so what is being read or stored stays until a later round. Nothing here
outlives the server, and neither does its DRAM. docs/decisions/0011-state-kinds-have-their-own-policy.md
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

from lmcache.v1.distributed.api import ObjectKey, PrefetchHandle, PrefetchTaskSpec
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.internal_api import L1ManagerListener
from lmcache.v1.multiprocess.engine_context import LayoutDescRegistry, MPCacheServerContext
from lmcache.v1.multiprocess.ext_server_module import ExtServerModuleBuildContext, server_module_handler
from lmcache.v1.periodic_thread import PeriodicThread, ThreadLevel, ThreadRunSummary, create_periodic_thread

from shoal_kvstore.metrics import WINDOW_OBJECTS

WINDOW_AGE_S = 180.0  # window state of the reference system is hit within three minutes or not at all
SEPARATES_GROUPS = "shoal.separates_groups"  # an engine with windows asks this before it starts

_AGE_SETTING = "window_age_s"
_LONGEST_ROUND_S = 5.0
_SLICE_OBJECTS = 4096  # deleted in one call, which holds LMCache's lock


@dataclass(slots=True)
class _Held:
    used_s: float
    is_shared: bool


@dataclass(frozen=True, slots=True)
class _Run:
    window_blocks: int
    keys: list[ObjectKey]


class WindowSizes:
    """Blocks that a group of layers looks back, by pool; asks LMCache's registry until it knows."""

    def __init__(self, registry: LayoutDescRegistry) -> None:
        self._registry = registry
        self._known: dict[tuple[str, int], tuple[int, ...]] = {}

    def of(self, key: ObjectKey) -> int | None:
        """None for full attention and for what no engine has told yet."""
        pool = (key.model_name, ObjectKey.WorldSizeFromKVRank(key.kv_rank))
        if pool not in self._known:
            try:
                self._known[pool] = tuple(self._registry.find_attn_desc(*pool).num_chunks_in_sw)
            except ValueError:
                return None
        sizes = self._known[pool]
        size = sizes[key.object_group_id] if key.object_group_id < len(sizes) else -1
        return size if size > 0 else None


class LevelPolicy(L1ManagerListener):
    """Hears of everything in one L1; ``share`` tells the shared level what to take, ``delete`` L1 what to let go.

    LMCache calls ``on_l1_keys_write_finished`` once for each run that a request stores, in the order of the blocks;
    behind it, in the store's queue, runs of several requests are mixed and their borders are gone.
    """

    def __init__(
        self,
        window_blocks: Callable[[ObjectKey], int | None],
        share: Callable[[list[ObjectKey]], None],
        delete: Callable[[list[ObjectKey]], Mapping[ObjectKey, L1Error]],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._window_blocks = window_blocks
        self._share = share
        self._delete = delete
        self._now_s = now_s
        self._lock = threading.Lock()
        self._held: OrderedDict[ObjectKey, _Held] = OrderedDict()  # window objects in DRAM, longest unused first

    def on_l1_keys_write_finished(self, keys: list[ObjectKey]) -> None:
        runs = self._windows(keys)
        last = {key for run in runs for key in run.keys[-run.window_blocks :]}
        kept = {key for run in runs for key in run.keys} - last
        with self._lock:
            for run in runs:
                for key in run.keys:
                    self._hold(key, is_shared=key in last)
        WINDOW_OBJECTS.labels("shared").inc(len(last))
        WINDOW_OBJECTS.labels("kept").inc(len(kept))
        if chosen := [key for key in keys if key not in kept]:
            self._share(chosen)

    def on_l1_keys_finish_write_and_reserve_read(self, keys: list[ObjectKey]) -> None:
        with self._lock:
            for run in self._windows(keys):
                for key in run.keys:
                    self._hold(key, is_shared=True)  # it came from there

    def on_l1_keys_accessed(self, keys: list[ObjectKey]) -> None:
        """Of a hit LMCache names the one window that is loaded; at the end of a request every block of its prompt."""
        new: list[ObjectKey] = []
        with self._lock:
            hit = [run for run in self._windows(keys) if len(run.keys) <= run.window_blocks]
            for key in (key for run in hit for key in run.keys if key in self._held):
                if not self._held[key].is_shared:
                    new.append(key)
                self._hold(key, is_shared=True)
        if new:
            WINDOW_OBJECTS.labels("shared").inc(len(new))
            self._share(new)

    def on_l1_keys_deleted_by_manager(self, keys: list[ObjectKey]) -> None:
        with self._lock:
            for key in keys:
                self._held.pop(key, None)

    def on_l1_keys_reserved_read(self, keys: list[ObjectKey]) -> None:
        """No use yet: a lookup reserves whatever is there and gives back what it does not load."""

    def on_l1_keys_read_finished(self, keys: list[ObjectKey]) -> None:
        """Told as a use when it was one."""

    def on_l1_keys_reserved_write(self, keys: list[ObjectKey]) -> None:
        """Not readable yet."""

    def expire(self, age_s: float) -> int:
        """Delete window objects that nobody hit for ``age_s``; how many went."""
        moment_s = self._now_s() - age_s
        overdue = self._unused_since(moment_s)
        expired = 0
        for start in range(0, len(overdue), _SLICE_OBJECTS):
            unused = self._still_unused(overdue[start : start + _SLICE_OBJECTS], moment_s)
            # What is locked is being read or stored: it stays, and comes up again in the next round.
            results = self._delete(unused) if unused else {}
            self.on_l1_keys_deleted_by_manager([key for key in results if results[key] is L1Error.KEY_NOT_EXIST])
            expired += sum(result is L1Error.SUCCESS for result in results.values())
        WINDOW_OBJECTS.labels("expired").inc(expired)
        return expired

    def _unused_since(self, moment_s: float) -> list[ObjectKey]:
        overdue: list[ObjectKey] = []
        with self._lock:
            for key, held in self._held.items():
                if held.used_s > moment_s:
                    break
                overdue.append(key)
        return overdue

    def _still_unused(self, keys: Sequence[ObjectKey], moment_s: float) -> list[ObjectKey]:
        """Without those hit, or gone, while others were being deleted."""
        with self._lock:
            return [key for key in keys if key in self._held and self._held[key].used_s <= moment_s]

    def _hold(self, key: ObjectKey, *, is_shared: bool) -> None:
        self._held[key] = _Held(self._now_s(), is_shared)
        self._held.move_to_end(key)

    def _windows(self, keys: Iterable[ObjectKey]) -> list[_Run]:
        """The window objects among ``keys``: those of one group, rank, salt and pool are one run."""
        runs: dict[tuple[str, str, int, int], _Run] = {}
        for key in keys:
            if (window_blocks := self._window_blocks(key)) is not None:
                name = (key.model_name, key.cache_salt, key.kv_rank, key.object_group_id)
                runs.setdefault(name, _Run(window_blocks, [])).keys.append(key)
        return list(runs.values())


class LevelModule:
    """The policies of one server, one for each of its L1s, and the thread that applies the age limit."""

    def __init__(self, context: MPCacheServerContext, *, window_age_s: float = WINDOW_AGE_S) -> None:
        self._context = context
        self._window_age_s = window_age_s
        windows = WindowSizes(context.layout_desc_registry)
        self._policies: list[LevelPolicy] = []
        storage = context.storage_manager
        for l1_id, l1 in storage._l1_managers_by_id.items():
            share = _take_over(storage._store_controllers[l1_id]._listener)
            policy = LevelPolicy(windows.of, share, l1.delete)
            l1.register_listener(policy)
            self._policies.append(policy)
        storage.submit_prefetch_task = loading_prefixes(storage.submit_prefetch_task)
        self._thread: PeriodicThread = create_periodic_thread(
            name="shoal-window-age",
            interval=min(window_age_s / 4, _LONGEST_ROUND_S),
            execute_fn=self._expire,
            level=ThreadLevel.MEDIUM,
        )
        self._thread.start()

    @property
    def context(self) -> MPCacheServerContext:
        """LMCache's protocol for modules asks for it."""
        return self._context

    def report_status(self) -> dict[str, Any]:
        """A part of what the server answers at /status."""
        return {"level_policy": {_AGE_SETTING: self._window_age_s}}

    def close(self) -> None:
        """Before the L1s are closed."""
        self._thread.stop()

    @server_module_handler(SEPARATES_GROUPS)
    def separates_groups(self, payload: bytes) -> bytes:
        """Whether window layers have objects of their own here: without that no policy can tell them apart."""
        return b"1" if self._context.separate_object_groups else b"0"

    def _expire(self) -> ThreadRunSummary:
        expired = sum(policy.expire(self._window_age_s) for policy in self._policies)
        return ThreadRunSummary(success=True, message=f"expired={expired}")


def build_level_module(builder: ExtServerModuleBuildContext) -> LevelModule:
    """For a factory of server modules; takes ``window_age_s`` from its configuration. ValueError stops the server."""
    window_age_s = builder.config.get(_AGE_SETTING, WINDOW_AGE_S)
    if not isinstance(window_age_s, int | float) or isinstance(window_age_s, bool) or not window_age_s > 0:
        raise ValueError(f"{_AGE_SETTING} must be a number of seconds above 0, not {window_age_s!r}")
    return LevelModule(builder.server_context, window_age_s=float(window_age_s))


def loading_prefixes(submit: Callable[..., PrefetchHandle]) -> Callable[..., PrefetchHandle]:
    """``submit`` for prefetches of models with windows too.

    LMCache prefetches whole blocks, and brings nothing when a group needs its last blocks only; what it does for a
    lookup, the longest prefix that can be used, is what a prefetch is for.
    """

    @wraps(submit)
    def submit_prefix(spec: PrefetchTaskSpec, *args: Any, **options: Any) -> PrefetchHandle:
        if any(group.sliding_window_size > 0 for group in spec.key_groups):
            spec = replace(spec, fetching_policy="prefix")
        return submit(spec, *args, **options)

    return submit_prefix


def _take_over(store_listener: L1ManagerListener) -> Callable[[list[ObjectKey]], None]:
    """From now on the queue to the shared level hears of new objects from us alone; returns how to tell it.

    LMCache's own hook for a policy comes behind that queue, where the borders of runs are lost.
    """
    enqueue: Callable[[list[ObjectKey]], None] = store_listener.on_l1_keys_write_finished
    store_listener.on_l1_keys_write_finished = _hear_nothing
    return enqueue


def _hear_nothing(keys: list[ObjectKey]) -> None:
    """What LMCache's L1 now tells the queue directly."""
