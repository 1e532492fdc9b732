"""The cure for engines that a quick restart of the server leaves unregistered.

An engine pings each second and registers its KV memory again only after a ping failed. A server that was away for
less than that answers every ping of engines it has never heard of, and refuses all their stores and loads for ever.
Here such a ping is answered "not well" once: the engine then takes the server for lost, finds it well at its next
ping, and registers. An engine that fails to register stays lost by itself and tries again at each ping.

It takes the place of LMCache's handler through the registrar that LMCache offers for its message queue.
docs/decisions/0007-the-store-tells-the-truth.md
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.multiprocess.engine_module import EngineModule
from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule
from lmcache.v1.multiprocess.request_handler import HandlerType
from lmcache.v1.multiprocess.transport.zmq_impl.mq import MessageQueueServer

from shoal_kvstore.metrics import ENGINES_SENT_BACK

log = init_logger(__name__)

PING = "ping"
MAX_SENT_BACK = 4096


class Pings:
    """Answers the pings of one server. LMCache's queue calls it from one thread; others may."""

    def __init__(self, registered: Callable[[], Iterable[int]], touch: Callable[[int], None]) -> None:
        self._registered = registered
        self._touch = touch
        self._lock = threading.Lock()
        self._sent_back: set[int] = set()

    def answer(self, instance_id: int | None) -> bool:
        """False to an engine that must register again; None is a prober that never registers."""
        if instance_id is None:
            return True
        self._touch(instance_id)
        is_known = instance_id in self._registered()
        with self._lock:
            if is_known:
                self._sent_back.discard(instance_id)
                return True
            if instance_id in self._sent_back:
                return True  # its next step is to register, which it takes on an answer like this
            if len(self._sent_back) >= MAX_SENT_BACK:
                self._sent_back.clear()  # engines that never came back; one that did is sent back once more
            self._sent_back.add(instance_id)
        ENGINES_SENT_BACK.inc()
        log.warning("store.engine_sent_back instance=%d", instance_id)
        return False


def cure(modules: Sequence[EngineModule]) -> Callable[[MessageQueueServer], None]:
    """A registrar for LMCache's queue; ``modules`` are LMCache's own, which know their engines."""
    targets = [module for module in modules if hasattr(module, "touch_instance")]

    def touch(instance_id: int) -> None:
        for target in targets:
            target.touch_instance(instance_id)

    pings = Pings(lambda: registered_engines(modules), touch)

    # LMCache compares these annotations with its protocol.
    def ping(instance_id: int | None) -> bool:
        return pings.answer(instance_id)

    def register(server: MessageQueueServer) -> None:
        if PING not in server.handlers:
            raise RuntimeError("LMCache's queue has no handler of pings: its protocol has changed")
        # On the queue's own thread: it takes microseconds, and must not wait behind lookups.
        server.add_handler(PING, HandlerType.SYNC, ping)

    return register


def registered_engines(modules: Iterable[EngineModule]) -> set[int]:
    """Engines that can store and load here, whichever way their bytes travel."""
    found: set[int] = set()
    for module in modules:
        if isinstance(module, LMCacheDrivenTransferModule):
            found.update(module.context_entries_snapshot())
        elif isinstance(module, EngineDrivenTransferModule):
            status: dict[str, Any] = module.report_status()
            found.update(status["registered_non_cuda_instance_ids"])
    return found
