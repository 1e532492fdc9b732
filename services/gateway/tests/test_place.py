"""Offers to decode workers: in the policy's order, one at a time, in line while all are full."""

import asyncio
from dataclasses import dataclass, field

import pytest

from shoal_contracts.errors import BadRequest, Refused, ShoalError, Unavailable
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.metrics import CATALOGUE
from shoal_gateway.ports import EndReason, Fallback
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import Placement, Prompt, ServedModel, TokenBatch
from shoal_gateway.silence import ASIDE_S
from shoal_gateway.steps.place import PlaceLimits, PlaceStep
from shoal_policy import DecodeWorkerView, PlacementPolicy
from shoal_testkit import VirtualClock, settle

FULL = Refused(pb.OVERLOADED, "full")
PROMPT = Prompt("model", pack_u32(range(10)), b"", b"", is_streaming=False)


class NoSink:
    """Nothing is told before a placement is accepted."""

    def on_started(self, hit_tokens: int) -> None: ...

    def on_tokens(self, batch: TokenBatch) -> None: ...

    def on_finished(self, reason: EndReason, failure: ShoalError | None) -> None: ...

    def on_lost(self, error: ShoalError) -> None: ...


@dataclass
class FakePlaced:
    """``answer`` None: the worker says nothing."""

    instance_id: str
    answer: ShoalError | bool | None
    cancels: int = 0

    async def accepted(self) -> None:
        if isinstance(self.answer, ShoalError):
            raise self.answer
        if self.answer is None:
            await asyncio.Event().wait()

    def cancel(self) -> None:
        self.cancels += 1


@dataclass
class FakeFleet:
    """Workers by name with their answer; all idle, so that the order is by load given here."""

    answers: dict[str, ShoalError | bool | None]
    offers: list[FakePlaced] = field(default_factory=list)
    room_event: asyncio.Event = field(default_factory=asyncio.Event)

    def models(self) -> list[ServedModel]:
        return []

    def workers(self, pool: str) -> list[DecodeWorkerView]:
        return [DecodeWorkerView(name, number, None, 0) for number, name in enumerate(self.answers)]

    def place(self, instance_id: str, placement: Placement, sink: object) -> FakePlaced:
        placed = FakePlaced(instance_id, self.answers[instance_id])
        self.offers.append(placed)
        return placed

    async def room(self, timeout_s: float) -> None:
        self.room_event.clear()
        await self.room_event.wait()


def a_placement(request_id: str = "r1") -> Placement:
    return Placement(request_id, "pool", "", PROMPT, b"", is_local_prefill=False, budget_s=10.0)


def a_step(
    fleet: FakeFleet, wait_s: float = 0.05, accept_s: float = 0.02, clock: VirtualClock | None = None
) -> PlaceStep:
    return PlaceStep(fleet, PlacementPolicy(), PlaceLimits(accept_s, wait_s), clock or VirtualClock())


async def test_best_worker_is_asked_first_and_the_next_when_it_refuses() -> None:
    fleet, receipt = FakeFleet({"a": FULL, "b": Unavailable(pb.UNAVAILABLE, "gone"), "c": True}), Receipt("r1")
    placed = await a_step(fleet).run(a_placement(), NoSink(), receipt)
    assert placed.instance_id == "c"
    assert [offer.instance_id for offer in fleet.offers] == ["a", "b", "c"]
    assert receipt.decode.attempts == 3
    assert receipt.fallbacks == [Fallback.PLACEMENT_REFUSED]


async def test_silent_worker_is_cancelled_before_the_next_is_asked() -> None:
    fleet = FakeFleet({"a": None, "b": True})
    placed = await a_step(fleet).run(a_placement(), NoSink(), Receipt("r1"))
    assert placed.instance_id == "b"
    assert [offer.cancels for offer in fleet.offers] == [1, 0]


async def test_worker_that_let_its_time_pass_is_asked_last_for_a_while() -> None:
    fleet, clock = FakeFleet({"a": None, "b": True}), VirtualClock()
    step = a_step(fleet, clock=clock)
    before = CATALOGUE.value("peers_put_aside_total", role="decode")
    for _ in range(2):
        await step.run(a_placement(), NoSink(), Receipt("r1"))
    assert [offer.instance_id for offer in fleet.offers] == ["a", "b", "b"]
    assert CATALOGUE.value("peers_put_aside_total", role="decode") == before + 1
    await clock.advance(ASIDE_S)
    await step.run(a_placement(), NoSink(), Receipt("r1"))
    assert [offer.instance_id for offer in fleet.offers] == ["a", "b", "b", "a", "b"]


async def test_waiting_for_room_is_bounded() -> None:
    with pytest.raises(Refused) as refused:
        await a_step(FakeFleet({"a": FULL})).run(a_placement(), NoSink(), Receipt("r1"))
    assert refused.value.code == pb.OVERLOADED
    assert refused.value.retry_after_s


async def test_no_worker_at_all_is_told_as_such() -> None:
    with pytest.raises(Unavailable):
        await a_step(FakeFleet({})).run(a_placement(), NoSink(), Receipt("r1"))


async def test_request_that_no_worker_can_ever_take_does_not_wait() -> None:
    fleet = FakeFleet({"a": BadRequest(pb.CONTEXT_LENGTH_EXCEEDED, "too long"), "b": True})
    with pytest.raises(BadRequest):
        await a_step(fleet).run(a_placement(), NoSink(), Receipt("r1"))
    assert len(fleet.offers) == 1


async def test_those_who_wait_keep_their_order_and_newcomers_do_not_overtake() -> None:
    fleet = FakeFleet({"a": FULL})
    step, placed = a_step(fleet, wait_s=5.0), []

    async def place(name: str) -> None:
        await step.run(a_placement(name), NoSink(), Receipt(name))
        placed.append(name)

    tasks = []
    for name in ("first", "second"):
        tasks.append(asyncio.create_task(place(name)))
        await settle()
    fleet.answers["a"] = True
    tasks.append(asyncio.create_task(place("third")))
    await settle()
    assert placed == []
    fleet.room_event.set()
    await asyncio.gather(*tasks)
    assert placed == ["first", "second", "third"]


async def test_request_that_ends_while_it_is_offered_cancels_the_offer() -> None:
    fleet = FakeFleet({"a": None})
    task = asyncio.create_task(a_step(fleet, accept_s=5.0).run(a_placement(), NoSink(), Receipt("r1")))
    await settle()
    task.cancel()
    await settle()
    assert task.cancelled()
    assert [offer.cancels for offer in fleet.offers] == [1]
