"""When a response is written, and what happens while Postgres is away."""

import asyncio
from typing import Any, cast

import pytest

from shoal_contracts.errors import Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.keeping import INSIST_EACH_S, INSIST_S, ResponseKeeper
from shoal_gateway.ports import Fallback
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import Storage
from shoal_testkit import VirtualClock, settle


class Store:
    """Writes, or fails, as it is told."""

    def __init__(self) -> None:
        self.is_away = False
        self.rows: dict[str, bytes] = {}

    async def put_running(self, tenant: str, storage: Storage, budget_s: float) -> None:
        self._write(storage.response_id, storage.pending_body)

    async def finish(self, tenant: str, response_id: str, body: bytes) -> None:
        self._write(response_id, body)

    async def put_done(self, tenant: str, storage: Storage, body: bytes) -> None:
        self._write(storage.response_id, body)

    def _write(self, response_id: str, body: bytes) -> None:
        if self.is_away:
            raise Unavailable(pb.UNAVAILABLE, "away")
        self.rows[response_id] = body


class Case:
    """One request that is kept."""

    def __init__(self, *, is_background: bool) -> None:
        self.store, self.receipt, self.clock = Store(), Receipt("r1"), VirtualClock()
        storage = Storage("resp_1", b"[]", is_background, None, b"pending", b"lost")
        self.keeper = ResponseKeeper(cast(Any, self.store), "", storage, self.receipt)


async def test_plain_response_is_written_once_at_its_end() -> None:
    case = Case(is_background=False)
    assert case.store.rows == {}
    await case.keeper.keep(b"done")
    assert case.store.rows == {"resp_1": b"done"}
    assert case.receipt.fallbacks == []


async def test_plain_response_without_postgres_is_told_as_not_stored() -> None:
    case = Case(is_background=False)
    case.store.is_away = True
    await case.keeper.keep(b"done")
    assert case.receipt.fallbacks == [Fallback.RESPONSE_NOT_STORED]


async def test_background_response_is_there_before_its_client_hears_of_it() -> None:
    case = Case(is_background=True)
    await case.keeper.begin(10.0)
    assert case.store.rows == {"resp_1": b"pending"}
    case.store.is_away = True
    with pytest.raises(Unavailable):
        await case.keeper.begin(10.0)


async def test_end_of_a_background_response_is_written_when_postgres_is_back() -> None:
    case = Case(is_background=True)
    await case.keeper.begin(10.0)
    case.store.is_away = True
    await case.keeper.keep(b"done")
    insisting = asyncio.create_task(case.keeper.insist(case.clock))
    await settle()
    case.store.is_away = False
    await case.clock.advance(INSIST_EACH_S)
    await insisting
    assert case.store.rows == {"resp_1": b"done"}
    assert case.receipt.fallbacks == []


async def test_nobody_insists_for_ever() -> None:
    case = Case(is_background=True)
    case.store.is_away = True
    await case.keeper.keep(b"done")
    insisting = asyncio.create_task(case.keeper.insist(case.clock))
    for _ in range(round(INSIST_S / INSIST_EACH_S)):
        assert not insisting.done()
        await case.clock.advance(INSIST_EACH_S)
    await insisting
    assert case.receipt.fallbacks == [Fallback.RESPONSE_NOT_STORED]


@pytest.mark.parametrize("is_closing", [False, True])
async def test_response_without_an_end_is_written_as_lost(is_closing: bool) -> None:
    case = Case(is_background=True)
    await case.keeper.begin(10.0)
    await (case.keeper.insist_briefly() if is_closing else case.keeper.insist(case.clock))
    assert case.store.rows == {"resp_1": b"lost"}


async def test_response_that_was_kept_is_not_lost_by_a_gateway_that_closes() -> None:
    case = Case(is_background=True)
    await case.keeper.begin(10.0)
    await case.keeper.keep(b"done")
    await case.keeper.insist_briefly()
    assert case.store.rows == {"resp_1": b"done"}
