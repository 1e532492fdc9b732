"""Whoever waits for a task is answered, once, with every result in its place."""

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from shoal_kvstore.threads import spread

WAIT_S = 10.0


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_results_stand_in_their_places(pool):
    answers = SimpleQueue()
    spread(pool, lambda place: place * 2, 100, -1, answers.put)
    assert list(answers.get(timeout=WAIT_S)) == list(range(0, 200, 2))
    assert answers.empty()


def test_nothing_to_do_is_done_at_once(pool):
    answers = SimpleQueue()
    spread(pool, lambda place: place, 0, -1, answers.put)
    assert list(answers.get(timeout=WAIT_S)) == []


@pytest.mark.logs_error("log")
def test_a_crash_fails_alone(pool):
    answers = SimpleQueue()
    spread(pool, lambda place: 1 // place, 3, -1, answers.put)
    assert list(answers.get(timeout=WAIT_S)) == [-1, 1, 0]


def test_a_closed_pool_answers_nobody():
    pool = ThreadPoolExecutor(1)
    started, go_on = threading.Event(), threading.Event()
    answers = SimpleQueue()

    def work(place: int) -> int:
        started.set()
        go_on.wait(WAIT_S)
        return place

    spread(pool, work, 3, -1, answers.put)
    started.wait(WAIT_S)
    pool.shutdown(wait=False, cancel_futures=True)
    go_on.set()
    pool.shutdown(wait=True)
    assert answers.empty()
