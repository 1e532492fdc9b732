"""One answer between stand-ins for its decode worker, its tokenizer and its client."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal_contracts.errors import ShoalError, Unavailable
from shoal_contracts.ids import pack_u32, unpack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.ports import Ending, EventSink, TokenSink
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import (
    BodyToEncode,
    Opening,
    Placement,
    Prompt,
    RequestPlan,
    ServedModel,
    TokenBatch,
)
from shoal_gateway.steps.choices import OtherChoices
from shoal_gateway.steps.place import PlaceLimits, PlaceStep
from shoal_gateway.steps.stream import AnswerStream, StreamLimits, StreamPeers
from shoal_policy import DecodeWorkerView, PlacementPolicy
from shoal_testkit import VirtualClock, settle

LOST = Unavailable(pb.UNAVAILABLE, "lost")
PROMPT = Prompt("model", pack_u32(range(10)), b"", b"state", is_streaming=True, max_tokens=8)
PLAN = RequestPlan("r1", ServedModel("model", "pool", 4, 100), PROMPT, "", deadline_s=2_000.0)


@dataclass
class Placed:
    placement: Placement
    sink: TokenSink
    instance_id: str = "decode"
    cancels: int = 0

    async def accepted(self) -> None:
        return

    def cancel(self) -> None:
        self.cancels += 1

    def generate(self, *tokens: int) -> None:
        self.sink.on_tokens(TokenBatch(pack_u32(tokens)))


@dataclass
class Decode:
    placed: list[Placed] = field(default_factory=list)

    def models(self) -> list[ServedModel]:
        return [PLAN.model]

    def workers(self, pool: str) -> list[DecodeWorkerView]:
        return [DecodeWorkerView("decode", 0, None, 0)]

    def place(self, instance_id: str, placement: Placement, sink: TokenSink) -> Placed:
        self.placed.append(Placed(placement, sink))
        return self.placed[-1]

    async def room(self, timeout_s: float) -> None:
        await asyncio.sleep(0)


@dataclass
class Events:
    opening: Opening
    sink: EventSink
    instance: str
    tokens: list[int] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    drops: int = 0

    def send(self, batch: TokenBatch) -> None:
        self.tokens += unpack_u32(batch.token_ids)

    def finish(self, ending: Ending) -> None:
        self.endings.append(ending)

    def drop(self) -> None:
        self.drops += 1

    def write(self) -> None:
        """Everything sent so far becomes an event."""
        parsed = len(self.opening.prior_token_ids) // 4 + len(self.tokens)
        self.sink.on_events(b"event", parsed, 1)

    def close(self, kept_body: bytes | None = None) -> None:
        self.sink.on_closed(len(self.opening.prior_token_ids) // 4 + len(self.tokens), kept_body)


@dataclass
class Tokenizers:
    opened: list[Events] = field(default_factory=list)
    avoided: list[frozenset[str]] = field(default_factory=list)

    async def encode(self, work: BodyToEncode) -> Prompt:
        return PROMPT

    async def count(self, work: BodyToEncode) -> bytes:
        return b""

    def open(self, opening: Opening, sink: EventSink, *, avoid: frozenset[str]) -> Events:
        self.avoided.append(avoid)
        self.opened.append(Events(opening, sink, f"tokenizer-{len(self.opened)}"))
        return self.opened[-1]


@dataclass
class Reader:
    has_head: bool = True
    room: int = 1_000
    events: list[bytes] = field(default_factory=list)

    body = b""

    async def read_body(self) -> None: ...

    def release_body(self) -> None: ...

    async def while_present(self, work: Coroutine[Any, Any, None]) -> None:
        await work

    def begin_events(self) -> None: ...

    def put(self, events: bytes, event_count: int = 0) -> bool:
        self.events.append(events)
        return len(self.events) <= self.room

    async def end(self, receipt_json: bytes | None) -> None: ...


class Case:
    """A running answer and its surroundings."""

    def __init__(self, place_attempts: int = 3, event_attempts: int = 3, plan: RequestPlan = PLAN) -> None:
        self.decode, self.tokenizers, self.client, self.clock = Decode(), Tokenizers(), Reader(), VirtualClock()
        self.receipt = Receipt("r1", prompt_tokens=10)
        place = PlaceStep(self.decode, PlacementPolicy(), PlaceLimits(1.0, 1.0), self.clock)
        peers = StreamPeers(place, self.tokenizers, self.client, self.clock)
        limits = StreamLimits(place_attempts, event_attempts, 1.0)
        self.answer = AnswerStream(plan, peers, limits, self.receipt, self.receipt.to_json)
        self.others = OtherChoices(
            plan, self.receipt, lambda plan, own: AnswerStream(plan, peers, limits, own, lambda: None)
        )
        self.running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self.others.run_with(self.answer)
        finally:
            self.answer.abort()

    @property
    def placed(self) -> Placed:
        return self.decode.placed[-1]

    @property
    def events(self) -> Events:
        return self.tokenizers.opened[-1]

    async def failure(self) -> ShoalError:
        with pytest.raises(ShoalError) as raised:
            await self.running
        return raised.value


async def started(plan: RequestPlan = PLAN, **limits: int) -> Case:
    case = Case(plan=plan, **limits)
    await settle()
    return case
