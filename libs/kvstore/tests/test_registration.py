"""An engine that the server does not know is sent back once, and LMCache still offers what the cure needs."""

import pytest
import zmq
from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule
from lmcache.v1.multiprocess.modules.management import ManagementModule
from lmcache.v1.multiprocess.request_handler import HandlerType, get_request_handler_options
from lmcache.v1.multiprocess.transport.zmq_impl.mq import MessageQueueServer

from shoal_kvstore import registration
from shoal_kvstore.registration import Pings, cure, registered_engines


class Engines:
    """Who is registered, and whose ping was noted."""

    def __init__(self, *instance_ids: int) -> None:
        self.registered = set(instance_ids)
        self.touched: list[int] = []
        self.pings = Pings(lambda: self.registered, self.touched.append)


def test_an_unknown_engine_is_sent_back_once_so_that_it_registers():
    engines = Engines(1)
    assert engines.pings.answer(1) is True
    assert engines.pings.answer(2) is False
    assert engines.pings.answer(2) is True  # on this one it registers
    engines.registered.add(2)
    assert engines.pings.answer(2) is True
    engines.registered.remove(2)  # forgotten again
    assert engines.pings.answer(2) is False
    assert engines.touched == [1, 2, 2, 2, 2]


def test_a_prober_is_never_sent_back():
    engines = Engines()
    assert engines.pings.answer(None) is True
    assert engines.touched == []


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(registration, "MAX_SENT_BACK", 2)
    engines = Engines()
    assert [engines.pings.answer(number) for number in (1, 2, 1, 3, 1)] == [False, False, True, False, False]


class Transfer(LMCacheDrivenTransferModule):
    """LMCache's module with engines in it, and none of its memory."""

    def __init__(self, *instance_ids: int) -> None:
        self.entries = dict.fromkeys(instance_ids)
        self.touched: list[int] = []

    def context_entries_snapshot(self):
        return dict(self.entries)

    def touch_instance(self, instance_id):
        self.touched.append(instance_id)


class OtherTransfer(EngineDrivenTransferModule):
    def __init__(self, *instance_ids: int) -> None:
        self.instance_ids = list(instance_ids)

    def report_status(self):
        return {"registered_non_cuda_instance_ids": self.instance_ids}

    def touch_instance(self, instance_id):
        pass


def test_engines_are_known_whichever_way_their_bytes_travel():
    assert registered_engines([Transfer(1, 2), OtherTransfer(2, 3), object()]) == {1, 2, 3}


@pytest.fixture
def queue():
    queue = MessageQueueServer("tcp://127.0.0.1:*", zmq.Context.instance())
    yield queue
    queue.socket.close(linger=0)


def test_the_cure_takes_the_place_of_lmcaches_handler(queue):
    queue.add_handler("ping", HandlerType.BLOCKING, answered_as_lmcache_does)
    transfer = Transfer(7)
    cure([transfer])(queue)
    handler = queue.handlers["ping"]
    assert handler.get_handler_type() is HandlerType.SYNC
    assert transfer.touched == []


def answered_as_lmcache_does(instance_id: int | None) -> bool:
    return True


def test_a_queue_without_pings_stops_the_start(queue):
    with pytest.raises(RuntimeError, match="protocol has changed"):
        cure([])(queue)


def test_lmcache_still_answers_pings_there():
    """What the cure replaces: if this fails, LMCache has changed and the cure must be looked at."""
    assert get_request_handler_options(ManagementModule.ping) is not None
    assert callable(EngineDrivenTransferModule.report_status)
    assert callable(LMCacheDrivenTransferModule.context_entries_snapshot)
