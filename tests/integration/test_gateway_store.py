"""Stored responses in a real Postgres: what is there, for whom and how long, and what a conversation is made of."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
import pytest_asyncio
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

from shoal_contracts.errors import BadRequest, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.request import ONE_TENANT, Storage
from shoal_gateway.store.engine import create_engine, upgrade
from shoal_gateway.store.responses import MAX_HISTORY_BYTES, MAX_TURNS, SWEEP_ROWS, PostgresResponses
from shoal_gateway.store.tables import SCHEMA, metadata
from shoal_gateway.store.watch import SWEEP_EACH_S, StoreWatch
from shoal_runtime.health import Health
from shoal_testkit import VirtualClock
from shoal_testkit.servers import PostgresRunning

OTHER_TENANT = "other"
DAY = timedelta(days=1)


@pytest_asyncio.fixture
async def empty_url(postgres: PostgresRunning) -> str:
    return await postgres.create_database()


@pytest_asyncio.fixture
async def engine(empty_url: str) -> AsyncIterator[AsyncEngine]:
    await upgrade(empty_url)
    engine = create_engine(empty_url)
    yield engine
    await engine.dispose()


def a_store(engine: AsyncEngine, retention: timedelta = DAY) -> PostgresResponses:
    store = PostgresResponses(engine, retention)
    store.is_ready = True
    return store


@pytest.fixture
def store(engine: AsyncEngine) -> PostgresResponses:
    return a_store(engine)


def a_storage(response_id: str, previous: str | None = None, said: str = "", **changes: object) -> Storage:
    items = json.dumps([{"id": f"in_{response_id}", "text": said}]).encode()
    usual = {"is_background": False, "pending_body": b'{"status":"queued"}', "lost_body": b'{"status":"failed"}'}
    return Storage(response_id, items, previous_response_id=previous, **(usual | changes))  # type: ignore[arg-type]


def a_body(response_id: str, said: str = "") -> bytes:
    return json.dumps({"id": response_id, "output": [{"id": f"out_{response_id}", "text": said}]}).encode()


async def put(store: PostgresResponses, response_id: str, previous: str | None = None, size: int = 1) -> None:
    await store.put_done(ONE_TENANT, a_storage(response_id, previous, "q" * size), a_body(response_id, "a"))


async def turns(store: PostgresResponses, response_id: str) -> list[str]:
    return [item["id"] for item in json.loads(await store.history(ONE_TENANT, response_id))]


async def refusal(store: PostgresResponses, response_id: str) -> BadRequest:
    with pytest.raises(BadRequest) as raised:
        await store.history(ONE_TENANT, response_id)
    assert raised.value.param == "previous_response_id"
    return raised.value


async def test_what_was_put_is_there_for_its_tenant_alone(store: PostgresResponses) -> None:
    body = b'{ "id": "resp_1", "text": "\\u0000 \xc3\xbc" }'
    await store.put_done(ONE_TENANT, a_storage("resp_1"), body)
    found = await store.find(ONE_TENANT, "resp_1")
    assert found is not None
    assert (found.body, found.is_running, found.is_background) == (body, False, False)
    assert json.loads(await store.input_items(ONE_TENANT, "resp_1") or b"") == [{"id": "in_resp_1", "text": ""}]
    assert await store.find(OTHER_TENANT, "resp_1") is None
    assert await store.input_items(OTHER_TENANT, "resp_1") is None
    assert await store.delete(OTHER_TENANT, "resp_1") is None
    assert await store.delete(ONE_TENANT, "resp_1") == found
    assert await store.find(ONE_TENANT, "resp_1") is None


@pytest.mark.parametrize("name", ["", "a\0b", "ä", "a" * 200, "' OR 1=1 --", "\ud800"])
async def test_ids_that_we_never_make_are_nobodys(store: PostgresResponses, name: str) -> None:
    assert await store.find(ONE_TENANT, name) is None
    assert await store.input_items(ONE_TENANT, name) is None
    assert await store.delete(ONE_TENANT, name) is None
    assert (await refusal(store, name)).code == pb.NOT_FOUND
    assert store.is_ready


async def test_running_response_ends_once(store: PostgresResponses) -> None:
    await store.put_running(ONE_TENANT, a_storage("resp_1", is_background=True), 60.0)
    found = await store.find(ONE_TENANT, "resp_1")
    assert found is not None and (found.body, found.is_running) == (b'{"status":"queued"}', True)
    await store.finish(ONE_TENANT, "resp_1", b'{"n":1}')
    await store.finish(ONE_TENANT, "resp_1", b'{"n":2}')
    found = await store.find(ONE_TENANT, "resp_1")
    assert found is not None and (found.body, found.is_running, found.is_background) == (b'{"n":1}', False, True)


async def test_response_whose_time_is_over_is_lost_and_stays_so(store: PostgresResponses) -> None:
    await store.put_running(ONE_TENANT, a_storage("resp_1", is_background=True), 0.05)
    await asyncio.sleep(0.1)
    await store.finish(ONE_TENANT, "resp_1", b"{}")
    found = await store.find(ONE_TENANT, "resp_1")
    assert found is not None and (found.body, found.is_running) == (b'{"status":"failed"}', False)


async def test_deleted_response_does_not_come_back_at_its_end(store: PostgresResponses) -> None:
    await store.put_running(ONE_TENANT, a_storage("resp_1", is_background=True), 60.0)
    deleted = await store.delete(ONE_TENANT, "resp_1")
    assert deleted is not None and deleted.is_running
    await store.finish(ONE_TENANT, "resp_1", b"{}")
    assert await store.find(ONE_TENANT, "resp_1") is None


async def test_history_is_every_turn_oldest_first(store: PostgresResponses) -> None:
    await put(store, "resp_1")
    await put(store, "resp_2", "resp_1")
    await put(store, "resp_2b", "resp_1")
    await put(store, "resp_3", "resp_2")
    assert await turns(store, "resp_3") == [f"{part}_resp_{turn}" for turn in (1, 2, 3) for part in ("in", "out")]
    assert await turns(store, "resp_2b") == ["in_resp_1", "out_resp_1", "in_resp_2b", "out_resp_2b"]
    with pytest.raises(BadRequest):
        await store.history(OTHER_TENANT, "resp_3")


async def test_history_with_a_hole_names_the_response_that_is_gone(store: PostgresResponses) -> None:
    await put(store, "resp_1")
    await put(store, "resp_2", "resp_1")
    await put(store, "resp_3", "resp_2")
    await store.delete(ONE_TENANT, "resp_1")
    error = await refusal(store, "resp_3")
    assert error.code == pb.NOT_FOUND
    assert "'resp_1'" in error.message
    assert "'resp_9'" in (await refusal(store, "resp_9")).message


async def test_nobody_goes_on_with_what_still_runs(store: PostgresResponses) -> None:
    await store.put_running(ONE_TENANT, a_storage("resp_1", is_background=True), 60.0)
    await put(store, "resp_2", "resp_1")
    assert (await refusal(store, "resp_1")).code == pb.INVALID_REQUEST
    assert (await refusal(store, "resp_2")).code == pb.INVALID_REQUEST


async def test_history_is_bounded_in_bytes(store: PostgresResponses) -> None:
    await put(store, "resp_1", size=MAX_HISTORY_BYTES // 2)
    await put(store, "resp_2", "resp_1", size=MAX_HISTORY_BYTES // 2 - 1000)
    await put(store, "resp_3", "resp_2", size=2000)
    assert len(await turns(store, "resp_2")) == 4
    assert (await refusal(store, "resp_3")).code == pb.REQUEST_TOO_LARGE


async def test_history_is_bounded_in_turns(store: PostgresResponses, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(
            text("""
            INSERT INTO gateway.responses (tenant, id, previous_response_id, created_at, expires_at, is_background,
                                           input_items, output_items, body, items_bytes)
            SELECT '', 'resp_' || n, CASE WHEN n > 1 THEN 'resp_' || n - 1 END, now(), now() + interval '1 day', false,
                   '[]', '[]', '{}', 4 FROM generate_series(1, :rows) n
            """),
            {"rows": MAX_TURNS},
        )
    assert await turns(store, f"resp_{MAX_TURNS - 1}") == []
    assert (await refusal(store, f"resp_{MAX_TURNS}")).code == pb.REQUEST_TOO_LARGE


async def test_what_has_expired_is_gone_at_once_and_swept_later(engine: AsyncEngine, store: PostgresResponses) -> None:
    hasty = a_store(engine, timedelta(milliseconds=1))
    await put(store, "resp_kept")
    await put(hasty, "resp_1")
    await put(store, "resp_2", "resp_1")
    await asyncio.sleep(0.01)
    assert await store.find(ONE_TENANT, "resp_1") is None
    assert await store.input_items(ONE_TENANT, "resp_1") is None
    assert (await refusal(store, "resp_2")).code == pb.NOT_FOUND
    swept = await asyncio.gather(*(a_store(engine).sweep() for _ in range(4)))
    assert sum(swept) == 1, "one gateway at a time"
    assert await store.sweep() == 0
    assert await store.find(ONE_TENANT, "resp_kept") is not None


async def test_sweep_is_bounded_and_goes_on(engine: AsyncEngine, empty_url: str) -> None:
    hasty, clock = a_store(engine, timedelta(milliseconds=1)), VirtualClock()
    rows = SWEEP_ROWS + 5
    await asyncio.gather(*(put(hasty, f"resp_{number}") for number in range(rows)))
    await asyncio.sleep(0.01)
    watch = StoreWatch(empty_url, engine, hasty, clock, Health())
    left = []

    async def check() -> None:
        await watch.check()
        async with engine.begin() as connection:
            left.append((await connection.execute(text("SELECT count(*) FROM gateway.responses"))).scalar_one())

    await check()
    await check()
    await put(hasty, "resp_late")
    await asyncio.sleep(0.01)
    await check()
    await clock.advance(SWEEP_EACH_S)
    await check()
    assert left == [5, 0, 1, 0], "at once while there is more, then now and then"


async def test_watch_brings_the_schema_and_says_what_is_away(empty_url: str) -> None:
    engine, nowhere = create_engine(empty_url), "postgresql://nobody@127.0.0.1:1/none"
    store, health = PostgresResponses(engine, DAY), Health()
    try:
        assert store.is_away
        with pytest.raises(Unavailable) as refused:
            await store.find(ONE_TENANT, "resp_1")
        assert refused.value.retry_after_s
        await StoreWatch(nowhere, engine, store, VirtualClock(), health).check()
        assert store.is_away and health.is_ready and "postgres" in health.report
        await StoreWatch(empty_url, engine, store, VirtualClock(), health).check()
        assert not store.is_away and health.report == {}
        assert await store.find(ONE_TENANT, "resp_1") is None
    finally:
        await engine.dispose()


async def test_statement_that_fails_says_so_until_the_watch_looked(empty_url: str, engine: AsyncEngine) -> None:
    store, health = a_store(engine), Health()
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE gateway.responses RENAME TO away"))
    with pytest.raises(Unavailable):
        await store.find(ONE_TENANT, "resp_1")
    assert store.is_away
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE gateway.away RENAME TO responses"))
    await StoreWatch(empty_url, engine, store, VirtualClock(), health).check()
    assert await store.find(ONE_TENANT, "resp_1") is None


async def test_the_migrations_make_what_the_tables_say(engine: AsyncEngine, empty_url: str) -> None:
    def differences(connection: Connection) -> list[object]:
        options = {
            "include_schemas": True,
            "include_name": lambda name, kind, _: kind != "schema" or name == SCHEMA,
            "version_table_schema": SCHEMA,
        }
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))

    assert await upgrade(empty_url) == await upgrade(empty_url)
    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []
