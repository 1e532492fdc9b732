"""Metrics of the store's plugins; they stand beside LMCache's own on the server's /metrics."""

import functools
from collections.abc import Iterator

from prometheus_client import REGISTRY, Metric
from prometheus_client.registry import Collector

from shoal_runtime.metrics import Catalogue

CATALOGUE = Catalogue("shoal_store")

STORED = CATALOGUE.counter(
    "stored_objects_total",
    "Objects given to the shared level, by outcome: stored, present (it was there), or why it could not be written.",
    ["outcome"],
    action="full, read_only, refused, failed: blocks are computed again until the file system takes writes.",
)
LOADED = CATALOGUE.counter(
    "loaded_objects_total",
    "Objects asked from the shared level: loaded, missing, unreadable, or how the file was damaged.",
    ["outcome"],
    action="Anything but loaded was computed again. Damage points at the disk or at a writer that is not ours.",
)
LOST = CATALOGUE.counter(
    "lost_objects_total",
    "Files found missing in the middle of a stored prefix: gone without having been deleted through a server.",
    action="Somebody removes files below the store; the index was told, the blocks are stored again when computed.",
)
REMOVED = CATALOGUE.counter(
    "removed_objects_total",
    "Files taken away, by reason: deleted (asked for), damaged, or failed (it could not be removed).",
    ["reason"],
    action="failed: the folder does not allow it; a damaged file there is read again in vain each time.",
)
STORED_BYTES = CATALOGUE.counter(
    "stored_bytes_total",
    "Bytes written to the shared level, headers included.",
    action="The rate against what the disk takes says how much room is left.",
)
LOADED_BYTES = CATALOGUE.counter(
    "loaded_bytes_total",
    "Bytes loaded from the shared level and found right.",
    action="The rate against what the disk gives says how much room is left.",
)
ENGINES_SENT_BACK = CATALOGUE.counter(
    "engines_sent_back_total",
    "Engines that this server did not know and that were made to register again.",
    action="One for each engine after a restart of the server; more means that registering fails: see its log.",
)
STANDSTILLS = CATALOGUE.counter(
    "standstills_total",
    "Times that this server stood still for about a second, and refused what engines had asked for before.",
    action="Find what stops it: swapping, a paused virtual machine, far too many processes. Hits are lost each time.",
)
WINDOW_OBJECTS = CATALOGUE.counter(
    "window_objects_total",
    "Objects of sliding windows: shared (to the shared level too), kept (in DRAM alone), expired (left DRAM unused).",
    ["outcome"],
    action="shared near kept + shared: the engine's steps are short beside its window; raise its max_step_tokens.",
)


class _OnTheServer(Collector):
    """Shows the catalogue in the process's default registry, which is what an ``lmcache server`` serves."""

    def collect(self) -> Iterator[Metric]:
        yield from CATALOGUE.registry.collect()


@functools.cache
def show() -> None:
    """Serve the catalogue with LMCache's metrics; again does nothing."""
    REGISTRY.register(_OnTheServer())
