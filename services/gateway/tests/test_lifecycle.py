"""What a request holds on its way."""

import asyncio
import contextlib
from dataclasses import replace
from typing import Any, cast

import pytest

from shoal_contracts.errors import BadRequest
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.admission import AdmissionGate
from shoal_gateway.background import BackgroundRuns
from shoal_gateway.history import AnswerHistory
from shoal_gateway.lifecycle import Lifecycle, River
from shoal_gateway.pace import PrefillPaces
from shoal_gateway.presence import BodyRoom, ClientConnection, PresenceLimits
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import BlockClaim, Blocks, BodyToEncode, Matched, Options, Prompt, RequestPlan, ServedModel
from shoal_gateway.steps.encode import EncodeStep
from shoal_gateway.steps.match import Affinity, MatchStep
from shoal_gateway.steps.settle import SettleStep
from shoal_gateway.steps.stream import StreamLimits
from shoal_policy import AdmissionPolicy, AffinityPolicy
from shoal_testkit import VirtualClock, settle

BODY = b"a body"


class Peers:
    """A tokenizer, a decode fleet, and an index that does not answer before it is told ``matched``."""

    def __init__(self, room: BodyRoom) -> None:
        self.room = room
        self.error: BadRequest | None = None
        self.encoded: list[tuple[bytes, int]] = []
        self.matched: Matched | None = None
        self.settled: list[BlockClaim] = []

    async def encode(self, work: BodyToEncode) -> Prompt:
        self.encoded.append((work.body, self.room.bytes))
        if self.error is not None:
            raise self.error
        return Prompt("model", pack_u32(range(10)), b"", b"", is_streaming=False)

    def models(self) -> list[ServedModel]:
        return [ServedModel("model", "pool", 4, 100)]

    async def match(self, claim: BlockClaim, *, hold_s: float, pending_s: float) -> Matched:
        if self.matched is None:
            await asyncio.Event().wait()
        assert self.matched is not None
        return self.matched

    def settle(self, claim: BlockClaim) -> None:
        self.settled.append(claim)


class Prefill:
    """The step that computes: it never ends, or promises as many blocks as it is told."""

    def __init__(self) -> None:
        self.promised_blocks: int | None = None

    async def run(self, plan: RequestPlan, blocks: Blocks, receipt: Receipt) -> RequestPlan:
        if self.promised_blocks is None:
            await asyncio.Event().wait()
        assert self.promised_blocks is not None
        return replace(plan, promised_blocks=self.promised_blocks)


class NowhereToPlace:
    """The step that ends every request that comes so far."""

    async def run(self, *args: Any) -> None:
        raise BadRequest(pb.INVALID_REQUEST, "no worker takes this")


class Case:
    """One lifecycle over a real client connection."""

    def __init__(self) -> None:
        self.room = BodyRoom(100)
        self.peers = cast(Any, Peers(self.room))
        self.gate = AdmissionGate(AdmissionPolicy(1, 1), 60.0)
        incoming: asyncio.Queue[Any] = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": BODY, "more_body": False})
        history, clock = AnswerHistory(0), VirtualClock()
        self.prefill = Prefill()
        river = River(
            admission=self.gate,
            encode=EncodeStep(self.peers, self.peers, self.peers),
            match=MatchStep(self.peers, history, Affinity(AffinityPolicy(), PrefillPaces()), clock),
            prefill=cast(Any, self.prefill),
            place=cast(Any, NowhereToPlace()),
            settle=SettleStep(self.peers, history, lambda receipt: None),
            tokenizers=self.peers,
            clock=clock,
            stream_limits=StreamLimits(1, 1, 1.0),
            budget_s=60.0,
            responses=self.peers,
            background=BackgroundRuns(cast(Any, None)),
        )
        limits = PresenceLimits(100, 1.0, 5.0, 5.0, 100)
        self.client = ClientConnection(incoming.get, _unsent, Options("r1"), limits, self.room, lambda: None)
        self.lifecycle = Lifecycle(river, self.client, Options("r1"))


async def _unsent(message: Any) -> None:
    raise AssertionError(message)


async def test_body_is_held_and_counted_until_it_is_encoded() -> None:
    case = Case()
    async with case.gate.admit():  # it waits for this place
        running = asyncio.create_task(case.lifecycle.run())
        await settle()
        assert case.room.bytes == len(BODY)
    await settle()
    assert case.peers.encoded == [(BODY, len(BODY))]
    assert not running.done()
    assert (case.client.body, case.room.bytes) == (b"", 0)
    running.cancel()
    await settle()


async def test_body_that_cannot_be_encoded_is_released() -> None:
    case = Case()
    case.peers.error = BadRequest(pb.INVALID_REQUEST, "wrong")
    with pytest.raises(BadRequest):
        await case.lifecycle.run()
    assert (case.client.body, case.room.bytes) == (b"", 0)


@pytest.mark.parametrize(
    ("hit_blocks", "promised_blocks", "is_given_up"),
    [(1, 2, False), (1, 1, True), (1, 0, True), (1, None, True), (2, 0, False)],
    ids=["stored", "nothing stored", "store unknown", "client left", "nothing claimed"],
)
async def test_claim_is_given_up_when_its_blocks_will_not_come(
    hit_blocks: int, promised_blocks: int | None, is_given_up: bool
) -> None:
    case = Case()
    case.peers.matched, case.prefill.promised_blocks = Matched(hit_blocks), promised_blocks
    running = asyncio.create_task(case.lifecycle.run())
    await settle()
    given_up = [claim.request_id for claim in case.peers.settled if not claim.hashes]
    if promised_blocks is None:
        assert given_up == []
        running.cancel()
    with contextlib.suppress(BadRequest, asyncio.CancelledError):
        await running
    given_up = [claim.request_id for claim in case.peers.settled if not claim.hashes]
    assert given_up == ["r1"] * is_given_up
