"""Slots are bounded, given in order, and never lost."""

import asyncio

import pytest

from shoal_contracts.errors import Refused
from shoal_gateway.admission import AdmissionGate
from shoal_policy import AdmissionPolicy, AdmissionView
from shoal_testkit import settle


def a_gate(running: int = 1, waiting: int = 2, wait_s: float = 5.0) -> AdmissionGate:
    return AdmissionGate(AdmissionPolicy(running, waiting), wait_s)


class Requests:
    """Requests that hold their slot until they are told to end."""

    def __init__(self, gate: AdmissionGate) -> None:
        self._gate = gate
        self.started: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str) -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name))
        await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()

    async def _run(self, name: str) -> None:
        async with self._gate.admit():
            self.started.append(name)
            await self._ends[name].wait()


async def test_waiting_requests_start_in_the_order_they_came() -> None:
    gate = a_gate()
    requests = Requests(gate)
    for name in "abc":
        await requests.start(name)
    assert requests.started == ["a"]
    assert gate.view == AdmissionView(1, 2)
    for name in "abc":
        await requests.end(name)
    assert requests.started == ["a", "b", "c"]
    assert gate.view == AdmissionView(0, 0)


async def test_what_is_over_both_bounds_is_refused_with_a_time_to_come_back() -> None:
    gate = a_gate(waiting=0)
    async with gate.admit():
        with pytest.raises(Refused) as refused:
            async with gate.admit():
                pass
    assert refused.value.retry_after_s


async def test_waiting_ends_with_a_refusal() -> None:
    gate = a_gate(wait_s=0.01)
    async with gate.admit():
        with pytest.raises(Refused):
            async with gate.admit():
                pass
    assert gate.view == AdmissionView(0, 0)


async def test_slot_of_a_request_that_gives_up_at_its_turn_goes_to_the_next() -> None:
    gate = a_gate()
    requests = Requests(gate)
    async with gate.admit():
        await requests.start("b")
        await requests.start("c")
    requests.tasks["b"].cancel()  # its turn has come, and it does not know yet
    await settle()
    assert requests.started == ["c"]
    await requests.end("c")
    assert gate.view == AdmissionView(0, 0)


async def test_cancelled_waiter_leaves_the_line() -> None:
    gate = a_gate()
    requests = Requests(gate)
    for name in "abc":
        await requests.start(name)
    requests.tasks["b"].cancel()
    await settle()
    await requests.end("a")
    assert requests.started == ["a", "c"]
    await requests.end("c")
    assert gate.view == AdmissionView(0, 0)
