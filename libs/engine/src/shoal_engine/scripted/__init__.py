"""The scripted engine: an engine without a model, for tests, load and simulation."""

from shoal_engine.scripted.engine import Faults, ScriptedEngine, ScriptedModel
from shoal_engine.scripted.prefetch import Prefetcher
from shoal_engine.scripted.reporter import ReporterSettings, StoreReporter
from shoal_engine.scripted.server import ServedPool, StoreServer
from shoal_engine.scripted.settings import ScriptedSettings, build_scripted_engine
from shoal_engine.scripted.store import BlockKey, BlockStore, SharedFolder, SharedMemory, StoredObject, StoreEvent
from shoal_engine.scripted.timing import Timing

__all__ = [
    "BlockKey",
    "BlockStore",
    "Faults",
    "Prefetcher",
    "ReporterSettings",
    "ScriptedEngine",
    "ScriptedModel",
    "ScriptedSettings",
    "ServedPool",
    "SharedFolder",
    "SharedMemory",
    "StoreEvent",
    "StoreReporter",
    "StoreServer",
    "StoredObject",
    "Timing",
    "build_scripted_engine",
]
