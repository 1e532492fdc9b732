"""An engine that frees blocks early waits for its store, and never for ever; here because of the import of vLLM."""

import threading

import pytest
from lmcache.v1.multiprocess.futures import MessagingFuture

from shoal_engine.vllm import lmcache
from shoal_engine.vllm.lmcache import PooledConnector

pytestmark = pytest.mark.engine


class Store:
    """LMCache's adapter of the worker, as far as a wait sees it."""

    def __init__(self, *futures: MessagingFuture) -> None:
        self.store_futures = {str(number): future for number, future in enumerate(futures)}
        self._health_event = threading.Event()
        self._health_event.set()

    @property
    def is_healthy(self) -> bool:
        return self._health_event.is_set()


def await_stores(store: Store) -> None:
    connector = object.__new__(PooledConnector)
    connector.worker_adapter = store
    connector._await_stores()


def test_it_returns_when_every_store_was_answered() -> None:
    late, done = MessagingFuture(), MessagingFuture()
    done.set_result(True)
    answer = threading.Timer(0.2, late.set_result, (True,))
    answer.start()
    store = Store(done, late)
    await_stores(store)
    answer.join()
    assert late.query() and store.is_healthy


def test_a_store_that_is_lost_is_not_waited_for() -> None:
    store = Store(MessagingFuture())
    lost = threading.Timer(0.2, store._health_event.clear)
    lost.start()
    await_stores(store)
    lost.join()


def test_a_store_that_never_answers_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache, "STORE_WAIT_S", 0.1)
    store = Store(MessagingFuture())
    await_stores(store)
    assert not store.is_healthy
