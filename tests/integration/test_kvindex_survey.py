"""What the housekeeping asks of a real Postgres."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from shoal_kvindex.names import SHARED, Level, Namespace, ObjectKey, Part, Place
from shoal_kvindex.ports import Position
from shoal_kvindex.store.engine import create_engine, upgrade
from shoal_kvindex.store.survey import DirectorySurvey

POOL, TENANT = Namespace("pool", ""), Namespace("pool", "tenant")
NODE_A = Place(Level.L1, "node-a")
PARTS = [Part(0x02000200, 0), Part(0x02010201, 0)]

FILL = (
    "INSERT INTO kvindex.namespaces (pool, cache_salt) VALUES ('pool', ''), ('pool', 'tenant')",
    "INSERT INTO kvindex.places (level, instance_id) VALUES (2, ''), (1, 'node-a')",
    # 512 blocks: each first byte once in each namespace, a hundred with the same expiry.
    """INSERT INTO kvindex.blocks SELECT n.namespace_id, set_byte(decode(repeat('ab', 32), 'hex'), 0, b), b / 100
       FROM kvindex.namespaces n, generate_series(0, 255) b""",
    """INSERT INTO kvindex.objects SELECT b.namespace_id, b.block_hash, p.place_id, r.kv_rank, 0, 7
       FROM kvindex.blocks b, kvindex.places p, (VALUES (33554944), (33620481)) AS r(kv_rank)
       WHERE p.level = 2 OR get_byte(b.block_hash, 0) < 10""",
)


@pytest.fixture
async def survey(database_url: str) -> AsyncIterator[DirectorySurvey]:
    engine: AsyncEngine = create_engine(database_url)
    await upgrade(engine)
    async with engine.begin() as connection:
        for statement in FILL:
            await connection.execute(text(statement))
    yield DirectorySurvey(engine)
    await engine.dispose()


def block_hash(first: int) -> bytes:
    return bytes([first]) + b"\xab" * 31


async def test_objects_of_some_shards(survey: DirectorySurvey) -> None:
    for shards in (range(0, 1), range(200, 256), range(255, 256)):
        expected = {
            ObjectKey(space, block_hash(first), part) for space in (POOL, TENANT) for first in shards for part in PARTS
        }
        assert await survey.objects_at(SHARED, shards) == expected
    assert len(await survey.objects_at(NODE_A, range(256))) == 2 * 10 * 2
    assert await survey.objects_at(Place(Level.L1, "nobody"), range(256)) == set()


@pytest.mark.parametrize("limit", [1, 7, 64, 1000])
async def test_a_walk_meets_every_block_once_soonest_first(survey: DirectorySurvey, limit: int) -> None:
    for before_s, count in ((None, 512), (2, 400), (0, 0)):
        blocks = []
        position: Position | None = None
        while True:
            page, position = await survey.soonest(before_s, position, limit)
            blocks += page
            if position is None:
                break
        expiries = [block.expires_at_s for block in blocks]
        assert expiries == sorted(expiries)
        assert len({block.name for block in blocks}) == len(blocks) == count


async def test_a_block_has_all_its_objects_and_its_shared_bytes(survey: DirectorySurvey) -> None:
    name = (TENANT, block_hash(3))
    found = await survey.blocks([name, (TENANT, bytes(32)), (Namespace("other", ""), block_hash(3))])
    assert found.keys() == {name}
    assert set(found[name].objects) == {(place, part) for place in (SHARED, NODE_A) for part in PARTS}
    assert (found[name].shared_bytes, found[name].expires_at_s) == (14, 0)


async def test_the_sums(survey: DirectorySurvey) -> None:
    assert await survey.shared_bytes() == 512 * 2 * 7
    assert await survey.ages(0, [1, 2]) == [(1, 200), (2, 312)]
    assert await survey.ages(1, [1, 100]) == [(1, 400), (100, 112)]


async def test_an_empty_directory_has_answers(database_url: str) -> None:
    engine = create_engine(database_url)
    await upgrade(engine)
    survey = DirectorySurvey(engine)
    assert await survey.objects_at(SHARED, range(256)) == set()
    assert await survey.soonest(None, None, 10) == ([], None)
    assert await survey.shared_bytes() == 0
    await engine.dispose()
