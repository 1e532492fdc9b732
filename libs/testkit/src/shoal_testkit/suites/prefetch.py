"""What ``Engine.prefetch`` promises; part of ``EngineContract``.

Where a copy lies is seen by taking the others away: a hit after the shared level was emptied came from DRAM.
"""

import asyncio

import pytest

from shoal_engine.api import Engine, Prefetched
from shoal_testkit.suites.engine_lab import EngineLab, Variant, read


@pytest.mark.asyncio(loop_scope="class")
class PrefetchContract(EngineLab):
    """Needs what ``EngineContract`` needs."""

    async def test_prefetched_blocks_are_hit_without_the_shared_level(self, engine: Engine) -> None:
        prompt, salt = self.prompt(3 * engine.description.block_tokens + 5), self.a_salt()
        cold = await self.read(engine, self.a_request(prompt, salt=salt))
        await self.forget_engine_copies(engine)
        await self.forget_node_copies(engine, salt)
        async with asyncio.timeout(self.deadline_s):
            told = await engine.prefetch(self.a_request(prompt, salt=salt))
            again = await engine.prefetch(self.a_request(prompt, salt=salt))
        assert (told.blocks, again.blocks) == (3, 3)
        await self.forget_shared_copies(engine)
        hit = await self.read(engine, self.a_request(prompt, salt=salt))
        assert hit.hit_tokens == 3 * engine.description.block_tokens
        assert hit.token_ids == cold.token_ids
        assert engine.load().failed_prefetches == 0

    async def test_prefetch_of_what_is_not_stored_brings_and_computes_nothing(self, engine: Engine) -> None:
        prompt, salt = self.prompt(2 * engine.description.block_tokens + 5), self.a_salt()
        async with asyncio.timeout(self.deadline_s):
            assert (await engine.prefetch(self.a_request(prompt, salt=salt))).blocks == 0
            assert await engine.prefetch(self.a_request(self.prompt(20))) == Prefetched()
        load = engine.load()
        assert (load.running_requests, load.waiting_requests, load.failed_prefetches) == (0, 0, 0)
        assert (await self.read(engine, self.a_request(prompt, salt=salt))).hit_tokens == 0

    async def test_prefetch_of_a_request_that_runs_disturbs_nothing(self, engine: Engine) -> None:
        prompt, salt = self.prompt(2 * engine.description.block_tokens + 5), self.a_salt()
        alone = await self.read(engine, self.a_request(prompt, salt=self.a_salt()))
        request = self.a_request(prompt, salt=salt)
        async with asyncio.timeout(self.deadline_s):
            answer, _ = await asyncio.gather(read(engine, request), engine.prefetch(request))
        assert answer.token_ids == alone.token_ids

    async def test_cancelled_prefetch_ends_and_the_engine_serves_on(self, engine: Engine) -> None:
        prompt, salt = self.prompt(3 * engine.description.block_tokens + 5), self.a_salt()
        cold = await self.read(engine, self.a_request(prompt, salt=salt))
        await self.forget_engine_copies(engine)
        await self.forget_node_copies(engine, salt)
        prefetching = asyncio.create_task(engine.prefetch(self.a_request(prompt, salt=salt)))
        await asyncio.sleep(0)
        prefetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await prefetching
        hit = await self.read(engine, self.a_request(prompt, salt=salt))
        assert hit.hit_tokens >= 3 * engine.description.block_tokens
        assert hit.token_ids == cold.token_ids

    async def test_prefetch_never_raises(self, second: Engine) -> None:
        request = self.a_request(self.prompt(2 * second.description.block_tokens))
        assert await self.make_engine(Variant.NORMAL).prefetch(request) == Prefetched()
        async with asyncio.timeout(self.deadline_s):
            await second.stop()
            assert await second.prefetch(request) == Prefetched()
