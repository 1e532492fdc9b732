"""The promises of ``shoal_engine.api`` as tests; every engine runs them by subclassing ``EngineContract``.

The suite knows no engine: it makes one through the hooks of ``EngineLab``, speaks token ids, and asserts order and
equality, never times.
"""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from shoal_engine.api import Engine, EngineFailed, FinishReason, RequestRefused
from shoal_testkit.suites.constraint import ConstraintContract
from shoal_testkit.suites.engine_lab import GREEDY, Answer, Variant, read, whole_blocks_before_last
from shoal_testkit.suites.prefetch import PrefetchContract

__all__ = ["EngineContract", "Variant"]


@pytest.mark.asyncio(loop_scope="class")
class EngineContract(PrefetchContract, ConstraintContract):
    """Subclass as ``Test<Engine>``, implement the hooks, set the two numbers.

    ``make_engine`` must give at least four blocks of context and four running requests, compute in float32 (or
    exactly), and keep what it computed in a store that outlives the engine for the length of the class.
    """

    # Streams

    async def test_description_names_what_placement_needs(self, engine: Engine) -> None:
        description = engine.description
        assert description.model
        assert description.pool
        assert description.block_tokens >= 1
        assert description.max_context_tokens >= 4 * description.block_tokens
        assert description.max_running_requests >= 4
        assert [group.object_group_id for group in description.groups] == list(range(len(description.groups)))
        assert description.groups

    async def test_max_tokens_ends_with_length(self, engine: Engine) -> None:
        answer = await self.read(engine, self.a_request(self.prompt(20), max_tokens=7))
        assert len(answer.token_ids) == 7
        assert answer.finish is FinishReason.LENGTH
        assert answer.stop_token_id is None

    async def test_single_token_is_one_finishing_stream(self, engine: Engine) -> None:
        answer = await self.read(engine, self.a_request(self.prompt(1), max_tokens=1))
        assert len(answer.token_ids) == 1
        assert answer.finish is FinishReason.LENGTH

    async def test_end_of_context_ends_with_length(self, engine: Engine) -> None:
        prompt = self.prompt(engine.description.max_context_tokens - 3)
        for max_tokens in (None, 50):
            answer = await self.read(engine, self.a_request(prompt, max_tokens=max_tokens))
            assert len(answer.token_ids) == 3
            assert answer.finish is FinishReason.LENGTH

    async def test_stop_token_is_told_and_not_part_of_the_answer(self, engine: Engine) -> None:
        prompt = self.prompt(20)
        whole = (await self.read(engine, self.a_request(prompt, max_tokens=12))).token_ids
        stop = whole[6]
        sampling = replace(GREEDY, stop_token_ids=(stop,))
        answer = await self.read(engine, self.a_request(prompt, sampling, max_tokens=12))
        assert answer.token_ids == whole[: whole.index(stop)]
        assert answer.finish is FinishReason.STOP
        assert answer.stop_token_id == stop

    async def test_no_logprobs_unless_asked_for(self, engine: Engine) -> None:
        async with asyncio.timeout(self.deadline_s):
            steps = [step async for step in engine.generate(self.a_request(self.prompt(20)))]
        assert all(step.logprobs is None for step in steps)

    @pytest.mark.parametrize("alternatives", [0, 3])
    async def test_logprobs_have_one_entry_a_token(self, engine: Engine, alternatives: int) -> None:
        sampling = replace(GREEDY, logprobs=alternatives)
        answer = await self.read(engine, self.a_request(self.prompt(20), sampling, max_tokens=5))
        assert len(answer.logprobs) == len(answer.token_ids) == 5
        for token_id, told in zip(answer.token_ids, answer.logprobs, strict=True):
            assert told.logprob <= 0
            assert len(told.top) == alternatives
            assert [value for _, value in told.top] == sorted((value for _, value in told.top), reverse=True)
            if alternatives:
                assert told.top[0][0] == token_id
                assert told.top[0][1] == pytest.approx(told.logprob, abs=1e-4)

    async def test_logprobs_do_not_tell_the_stop_token(self, engine: Engine) -> None:
        prompt = self.prompt(20)
        whole = (await self.read(engine, self.a_request(prompt, max_tokens=4))).token_ids
        sampling = replace(GREEDY, stop_token_ids=(whole[-1],), logprobs=1)
        answer = await self.read(engine, self.a_request(prompt, sampling, max_tokens=4))
        assert len(answer.logprobs) == len(answer.token_ids) == whole.index(whole[-1])

    async def test_concurrent_requests_answer_as_alone(self, engine: Engine) -> None:
        prompts = [self.prompt(tokens) for tokens in (3, 40, 90, 200)]
        alone = [await self.read(engine, self.a_request(prompt, salt=self.a_salt())) for prompt in prompts]
        async with asyncio.timeout(self.deadline_s):
            together = await asyncio.gather(
                *(read(engine, self.a_request(prompt, salt=self.a_salt())) for prompt in prompts)
            )
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]

    # Prefill and resume

    async def test_prefill_counts_its_prompt_and_gives_the_first_token(self, engine: Engine) -> None:
        prompt, salt = self.prompt(2 * engine.description.block_tokens + 9), self.a_salt()
        async with asyncio.timeout(self.deadline_s):
            cold = await engine.prefill(self.a_request(prompt, salt=salt))
            warm = await engine.prefill(self.a_request(prompt, salt=salt))
        assert (cold.hit_tokens, cold.miss_tokens) == (0, len(prompt))
        assert warm.hit_tokens >= 2 * engine.description.block_tokens
        assert warm.hit_tokens + warm.miss_tokens == len(prompt)
        answer = await self.read(engine, self.a_request(prompt, max_tokens=1, salt=salt))
        assert {cold.first_token, warm.first_token} <= {answer.token_ids[0], None}

    async def test_resume_goes_on_as_if_never_interrupted(self, engine: Engine) -> None:
        prompt = self.prompt(engine.description.block_tokens - 4)
        whole = await self.read(engine, self.a_request(prompt, max_tokens=12))
        for sent in (1, 4, 11):
            request = replace(self.a_request(prompt, max_tokens=12), resumed_token_ids=whole.token_ids[:sent])
            rest = await self.read(engine, request)
            assert rest.token_ids == whole.token_ids[sent:]
            assert rest.finish is FinishReason.LENGTH

    async def test_resume_of_a_complete_answer_ends_at_once(self, engine: Engine) -> None:
        request = replace(self.a_request(self.prompt(20), max_tokens=4), resumed_token_ids=self.prompt(4))
        answer = await self.read(engine, request)
        assert answer.token_ids == []
        assert answer.finish is FinishReason.LENGTH

    # Hits

    async def test_hit_answers_as_cold(self, engine: Engine) -> None:
        block = engine.description.block_tokens
        for tokens in (1, block - 1, block, block + 1, 3 * block + 5):
            prompt, salt = self.prompt(tokens), self.a_salt()
            cold = await self.read(engine, self.a_request(prompt, salt=salt))
            hit = await self.read(engine, self.a_request(prompt, salt=salt))
            assert cold.hit_tokens == 0
            assert whole_blocks_before_last(tokens, block) <= hit.hit_tokens < tokens
            assert hit.token_ids == cold.token_ids

    async def test_stored_blocks_are_loaded_and_answer_as_cold(self, engine: Engine) -> None:
        block = engine.description.block_tokens
        prompt, salt = self.prompt(3 * block + 5), self.a_salt()
        failed_loads = engine.load().failed_loads
        cold = await self.read(engine, self.a_request(prompt, salt=salt))
        await self.forget_engine_copies(engine)
        hit = await self.read(engine, self.a_request(prompt, salt=salt))
        assert hit.hit_tokens >= 3 * block
        assert hit.token_ids == cold.token_ids
        assert engine.load().failed_loads == failed_loads

    async def test_another_engine_of_the_pool_loads_what_this_one_computed(
        self, engine: Engine, second: Engine
    ) -> None:
        assert second.description.pool == engine.description.pool
        block = engine.description.block_tokens
        prompt, salt = self.prompt(2 * block + 30), self.a_salt()
        cold = await self.read(engine, self.a_request(prompt, salt=self.a_salt()))
        async with asyncio.timeout(self.deadline_s):
            await engine.prefill(self.a_request(prompt, salt=salt))
        await self.forget_engine_copies(engine)
        handed_over = await self.read(second, self.a_request(prompt, salt=salt))
        assert handed_over.hit_tokens >= 2 * block
        assert handed_over.token_ids == cold.token_ids

    async def test_failed_load_is_computed_and_counted(self, engine: Engine) -> None:
        prompt, salt = self.prompt(3 * engine.description.block_tokens + 5), self.a_salt()
        cold = await self.read(engine, self.a_request(prompt, salt=salt))
        await self.forget_engine_copies(engine)
        failed_loads = engine.load().failed_loads
        async with self.failing_loads(engine):
            computed = await self.read(engine, self.a_request(prompt, salt=salt))
        assert computed.token_ids == cold.token_ids
        assert computed.finish is FinishReason.LENGTH
        assert computed.hit_tokens == 0
        assert engine.load().failed_loads == failed_loads + 1

    async def test_salts_share_nothing(self, engine: Engine) -> None:
        prompt = self.prompt(2 * engine.description.block_tokens + 5)
        mine = await self.read(engine, self.a_request(prompt, salt=self.a_salt()))
        yours = await self.read(engine, self.a_request(prompt, salt=self.a_salt()))
        assert yours.hit_tokens == 0
        assert yours.token_ids == mine.token_ids

    async def test_pools_share_nothing(self, engine: Engine, stranger: Engine) -> None:
        assert stranger.description.pool != engine.description.pool
        prompt, salt = self.prompt(2 * engine.description.block_tokens + 5), self.a_salt()
        await self.read(engine, self.a_request(prompt, salt=salt))
        await self.forget_engine_copies(engine)
        assert (await self.read(stranger, self.a_request(prompt, salt=salt))).hit_tokens == 0

    # Refusals and request ids

    async def test_prompt_without_room_for_a_token_is_refused_before_the_first_step(self, engine: Engine) -> None:
        context = engine.description.max_context_tokens
        too_long = self.a_request(self.prompt(context))
        resumed_too_far = replace(
            self.a_request(self.prompt(context - 10), max_tokens=None), resumed_token_ids=self.prompt(10)
        )
        for request in (too_long, resumed_too_far, self.a_request(self.prompt(context + 1))):
            with pytest.raises(RequestRefused):
                await self.read(engine, request)
        with pytest.raises(RequestRefused):
            await engine.prefill(too_long)
        assert engine.load().running_requests == 0
        await self.read(engine, self.a_request(self.prompt(20)))

    async def test_request_id_in_use_is_an_error_that_disturbs_nobody(self, engine: Engine) -> None:
        request = self.a_long_request(engine)
        answer = Answer()
        async with asyncio.timeout(self.deadline_s), aclosing(engine.generate(request)) as steps:
            answer.add(await anext(steps), is_first=True)
            with pytest.raises(ValueError):
                await read(engine, request)
            with pytest.raises(ValueError):
                await engine.prefill(request)
            answer.add(await anext(steps), is_first=False)
        await self.until_running(engine, 0)

    async def test_request_id_can_be_used_again_after_its_end(self, engine: Engine) -> None:
        request = self.a_request(self.prompt(20))
        first = await self.read(engine, request)
        again = await self.read(engine, request)
        assert again.token_ids == first.token_ids

    # Abort

    async def test_abort_ends_a_running_stream_with_cancel(self, engine: Engine) -> None:
        request = self.a_long_request(engine)
        answer = Answer()
        async with asyncio.timeout(self.deadline_s):
            async for step in engine.generate(request):
                answer.add(step, is_first=not answer.token_ids)
                await engine.abort(request.request_id)
                await engine.abort(request.request_id)
        assert answer.finish is FinishReason.CANCEL
        assert len(answer.token_ids) < engine.description.max_context_tokens - len(request.token_ids)
        await self.until_running(engine, 0)
        assert engine.load().cached_tokens == 0

    async def test_abort_before_the_first_token_ends_with_cancel(self, engine: Engine) -> None:
        request = self.a_request(self.prompt(engine.description.max_context_tokens - 100), max_tokens=None)
        reading = asyncio.create_task(self.read(engine, request))
        await self.until_running(engine, 1)
        await engine.abort(request.request_id)
        assert (await reading).finish is FinishReason.CANCEL
        await self.until_running(engine, 0)

    async def test_abort_of_unknown_or_finished_requests_is_nothing(self, engine: Engine) -> None:
        request = self.a_request(self.prompt(20))
        await engine.abort("nobody")
        first = await self.read(engine, request)
        await engine.abort(request.request_id)
        assert (await self.read(engine, request)).token_ids == first.token_ids

    async def test_abort_leaves_other_requests_alone(self, engine: Engine) -> None:
        prompt = self.prompt(30)
        alone = await self.read(engine, self.a_request(prompt, max_tokens=40))
        victim = self.a_long_request(engine)
        reading = asyncio.create_task(self.read(engine, victim))
        survivor = asyncio.create_task(self.read(engine, self.a_request(prompt, max_tokens=40)))
        await self.until_running(engine, 2)
        await engine.abort(victim.request_id)
        assert (await reading).finish is FinishReason.CANCEL
        assert (await survivor).token_ids == alone.token_ids

    async def test_closing_the_iterator_aborts(self, engine: Engine) -> None:
        request = self.a_long_request(engine)
        async with asyncio.timeout(self.deadline_s):
            async with aclosing(engine.generate(request)) as steps:
                await anext(steps)
            await self.until_running(engine, 0)
            short = replace(request, sampling=replace(request.sampling, max_tokens=3))
            assert len((await self.read(engine, short)).token_ids) == 3

    async def test_cancelling_the_reader_aborts(self, engine: Engine) -> None:
        reading = asyncio.create_task(self.read(engine, self.a_long_request(engine)))
        await self.until_running(engine, 1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await self.until_running(engine, 0)

    async def test_cancelling_prefill_aborts(self, engine: Engine) -> None:
        request = self.a_request(self.prompt(engine.description.max_context_tokens - 2))
        computing = asyncio.create_task(engine.prefill(request))
        await self.until_running(engine, 1)
        computing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await computing
        await self.until_running(engine, 0)
        async with asyncio.timeout(self.deadline_s):
            assert (await engine.prefill(request)).miss_tokens > 0

    async def test_abort_of_prefill_cancels_it(self, engine: Engine) -> None:
        request = self.a_request(self.prompt(engine.description.max_context_tokens - 2))
        computing = asyncio.create_task(engine.prefill(request))
        await self.until_running(engine, 1)
        await engine.abort(request.request_id)
        with pytest.raises(asyncio.CancelledError):
            await computing
        await self.until_running(engine, 0)

    # Load and life

    async def test_load_counts_what_runs(self, engine: Engine) -> None:
        request = self.a_long_request(engine)
        async with asyncio.timeout(self.deadline_s), aclosing(engine.generate(request)) as steps:
            await anext(steps)
            while (load := engine.load()).running_requests == 0:  # a reading may be a moment old
                await anext(steps)
            assert (load.running_requests, load.waiting_requests) == (1, 0)
            assert load.cached_tokens >= len(request.token_ids)
            assert load.max_cached_tokens is None or load.max_cached_tokens >= engine.description.max_context_tokens
        await self.until_running(engine, 0)
        assert engine.load().cached_tokens == 0

    async def test_check_passes_while_it_serves(self, engine: Engine) -> None:
        async with asyncio.timeout(self.deadline_s):
            await engine.check()

    async def test_load_never_raises(self) -> None:
        load = self.make_engine(Variant.NORMAL).load()
        assert (load.running_requests, load.waiting_requests, load.failed_loads) == (0, 0, 0)

    async def test_stop_cancels_what_runs_and_may_be_repeated(self, second: Engine) -> None:
        requests = [self.a_long_request(second) for _ in range(2)]
        reading = [asyncio.create_task(self.read(second, request)) for request in requests]
        async with asyncio.timeout(self.deadline_s):
            while second.load().cached_tokens < 2 * len(requests[0].token_ids):
                await asyncio.sleep(0)
            await second.stop()
            assert {answer.finish for answer in await asyncio.gather(*reading)} == {FinishReason.CANCEL}
            await second.stop()
        assert second.load().running_requests == 0
        with pytest.raises(EngineFailed):
            await self.read(second, self.a_request(self.prompt(20)))

    async def test_dead_engine_fails_its_requests_and_its_check_and_still_stops(self, second: Engine) -> None:
        reading = asyncio.create_task(self.read(second, self.a_long_request(second)))
        await self.until_running(second, 1)
        await self.break_engine(second)
        with pytest.raises(EngineFailed):
            await reading
        with pytest.raises(EngineFailed):
            await second.check()
        with pytest.raises(EngineFailed):
            await self.read(second, self.a_request(self.prompt(20)))
        assert second.load().running_requests == 0
        async with asyncio.timeout(self.deadline_s):
            await second.stop()

    async def test_failed_start_tells_and_can_be_stopped(self) -> None:
        engine = self.make_engine(Variant.CANNOT_START)
        with pytest.raises(EngineFailed):
            await engine.start()
        async with asyncio.timeout(self.deadline_s):
            await engine.stop()
            await engine.stop()
