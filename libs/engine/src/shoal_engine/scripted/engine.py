"""An engine without a model: real requests, steps, blocks and limits, invented tokens, settable durations.

Production code for tests, load and simulation. One task runs the step loop and owns every live request; the
others only mark (``abort``) or read (``StepBuffer``). Order inside a step border: aborted requests leave, waiting
ones enter while the step has room beyond what runs (only then, as in vLLM, is their hit looked up), then one step
computes a token for each decoding request and as much of prompts as fits. A step that fails kills the engine: every
request raises EngineFailed, and so does ``check``.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from shoal_contracts.ids import pack_u32
from shoal_engine.api import (
    ConstraintRefused,
    EngineDescription,
    EngineFailed,
    EngineLoad,
    EngineRequest,
    FinishReason,
    Prefetched,
    PrefillResult,
    RequestRefused,
    StateGroup,
    StateKind,
    Step,
    check_constraint,
)
from shoal_engine.grammar import check_grammar
from shoal_engine.scripted.constraint import Constraints
from shoal_engine.scripted.prefetch import Prefetcher
from shoal_engine.scripted.script import Script
from shoal_engine.scripted.sequence import LiveRequest, enter, invented_logprobs
from shoal_engine.scripted.server import StoreServer
from shoal_engine.scripted.store import OBJECT_GROUP, BlockStore
from shoal_engine.scripted.timing import Timing
from shoal_runtime.clock import Clock


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """What this engine pretends to be."""

    model: str = "scripted"
    pool: str = "scripted"
    vocabulary_tokens: int = 49_152
    eos_token_id: int | None = None  # drawn like any other token
    block_tokens: int = 128
    max_context_tokens: int = 8192
    max_running_requests: int = 16
    max_cached_tokens: int = 1 << 18
    max_step_tokens: int = 2048
    script: Script | None = None  # what it says instead of invented tokens
    constraints: Constraints | None = None  # None: a request with one is refused

    def __post_init__(self) -> None:
        if self.max_cached_tokens < self.max_context_tokens:
            raise ValueError("max_cached_tokens must hold at least one whole context")
        if self.max_step_tokens < self.max_running_requests:
            raise ValueError("max_step_tokens must hold one token for each running request")


def _never(*_: object) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, and when."""

    breaks_start: bool = False
    breaks_load: Callable[[str], bool] = _never  # of the request with this id
    breaks_step: Callable[[int], bool] = _never  # with this number, from 0
    loses_store: Callable[[], bool] = _never  # asked at each use: nothing is found, what is computed stays unstored


class ScriptedEngine:
    """See ``shoal_engine.api``. ``store`` may be shared by several engines of one process.

    ``server`` is the store's HTTP side, with its reports: it starts and stops with this engine.
    """

    def __init__(
        self,
        model: ScriptedModel,
        *,
        clock: Clock,
        store: BlockStore,
        timing: Timing | None = None,
        faults: Faults | None = None,
        server: StoreServer | None = None,
    ) -> None:
        self.aborted_requests = 0
        self._model = model
        self._clock = clock
        self._store = store
        self._timing = timing or Timing()
        self._faults = faults or Faults()
        self._server = server
        self._prefetcher = Prefetcher(store, self._timing, clock)
        self._live: dict[str, LiveRequest] = {}
        self._waiting: deque[LiveRequest] = deque()
        self._running: list[LiveRequest] = []
        self._failed_loads = 0
        self._steps = 0
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._failure: str | None = "the engine is not running"

    @property
    def description(self) -> EngineDescription:
        model = self._model
        return EngineDescription(
            model=model.model,
            pool=model.pool,
            block_tokens=model.block_tokens,
            max_context_tokens=model.max_context_tokens,
            max_running_requests=model.max_running_requests,
            groups=(StateGroup(OBJECT_GROUP, StateKind.FULL),),
            store_instance_id=self._server.instance_id if self._server is not None else "",
        )

    async def start(self) -> None:
        if self._faults.breaks_start:
            self._failure = "the engine was told to fail its start"
            raise EngineFailed(self._failure)
        if self._server is not None:
            await self._server.start()
        self._failure = None
        self._loop = asyncio.create_task(self._run(), name="scripted-engine")

    async def prefill(self, request: EngineRequest) -> PrefillResult:
        resumed_tokens = len(request.resumed_token_ids)
        one_token = replace(request, sampling=replace(request.sampling, max_tokens=resumed_tokens + 1, constraint=None))
        hit_tokens, first_token = 0, None
        async with aclosing(self.generate(one_token)) as steps:
            async for step in steps:
                if step.finish is FinishReason.CANCEL:
                    raise asyncio.CancelledError("the request was aborted")
                hit_tokens += step.hit_tokens or 0
                # A stop token is not told: whoever decodes computes it again and stops there.
                first_token = step.token_ids[0] if step.token_ids else None
        prompt_tokens = len(request.token_ids) + resumed_tokens
        return PrefillResult(hit_tokens, prompt_tokens - hit_tokens, first_token)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Step, None]:
        live = self._enter(request)
        await self._constrain(live)
        if live.answer_tokens >= live.max_tokens:
            yield Step((), hit_tokens=0, finish=FinishReason.LENGTH)
            return
        self._live[request.request_id] = live
        self._waiting.append(live)
        self._wake.set()
        try:
            step: Step | None = None
            while step is None or step.finish is None:
                step = await live.steps.take()
                yield step
        finally:
            self._abort(live)

    def _enter(self, request: EngineRequest) -> LiveRequest:
        if self._failure is not None:
            raise EngineFailed(self._failure)
        if request.request_id in self._live:
            raise ValueError(f"request id {request.request_id!r} is in use")
        tokens = len(request.token_ids) + len(request.resumed_token_ids)
        if not request.token_ids or tokens >= self._model.max_context_tokens:
            raise RequestRefused(f"{tokens} tokens leave no room in a context of {self._model.max_context_tokens}")
        check_constraint(request)
        model = self._model
        live = enter(request, model.vocabulary_tokens, model.block_tokens, model.eos_token_id)
        if model.script is not None:
            live.played = model.script.find(pack_u32(request.token_ids))
        return live

    async def _constrain(self, live: LiveRequest) -> None:
        constraint, constraints = live.request.sampling.constraint, self._model.constraints
        if constraint is None:
            return
        if constraints is None:
            raise ConstraintRefused("this engine has no tokenizer for it: set SHOAL_SCRIPTED_TOKENIZER")
        await check_grammar(constraint)
        live.constrained = await asyncio.to_thread(constraints.compile, constraint, live.stop_token_ids)

    async def prefetch(self, request: EngineRequest) -> Prefetched:
        if self._failure is not None or not request.token_ids or self._faults.loses_store():
            return Prefetched()
        began_s = self._clock.monotonic()
        model = self._model
        entered = enter(request, model.vocabulary_tokens, model.block_tokens, model.eos_token_id)
        keys = entered.keys(model.pool, model.block_tokens, len(entered.token_ids) - 1)
        blocks = await self._prefetcher.bring(keys)
        return Prefetched(blocks, round(1000 * (self._clock.monotonic() - began_s)))

    async def abort(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is not None:
            self._abort(live)

    def _abort(self, live: LiveRequest) -> None:
        if live.is_over or live.is_aborted:
            return
        live.is_aborted = True
        self.aborted_requests += 1
        self._wake.set()

    def load(self) -> EngineLoad:
        return EngineLoad(
            running_requests=len(self._running),
            waiting_requests=len(self._waiting),
            cached_tokens=self._cached_tokens(),
            max_cached_tokens=self._model.max_cached_tokens,
            failed_loads=self._failed_loads,
            is_store_lost=self._faults.loses_store(),
        )

    def _cached_tokens(self) -> int:
        return sum(len(live.token_ids) for live in self._running)

    async def check(self) -> None:
        if self._failure is not None:
            raise EngineFailed(self._failure)

    async def stop(self) -> None:
        self._failure = self._failure or "the engine was stopped"
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop])
            self._loop = None
        for live in list(self._live.values()):
            self._end(live, FinishReason.CANCEL)
        if self._server is not None:
            await self._server.stop()

    # The step loop

    async def _run(self) -> None:
        try:
            while True:
                await self._step()
        except EngineFailed as failure:
            self._failure = str(failure)
            for live in list(self._live.values()):
                live.steps.fail(EngineFailed(self._failure))
                self._release(live)

    async def _step(self) -> None:
        self._release_aborted()
        self._admit()
        batch = self._batch()
        if not batch:
            await self._until_work()
            return
        prompt_tokens = sum(tokens for live, tokens in batch if not live.is_decoding)
        await self._clock.sleep(self._timing.step_s(prompt_tokens, len(batch), self._cached_tokens()))
        if self._faults.breaks_step(self._steps):
            raise EngineFailed(f"step {self._steps} was told to fail")
        self._steps += 1
        for live, tokens in batch:
            if not live.is_aborted:
                self._advance(live, tokens)

    async def _until_work(self) -> None:
        """Until something enters or leaves, or the first load arrives."""
        loading = [live.loaded_at_s for live in self._running]
        self._wake.clear()
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(self._wake.wait())]
        if loading:
            waits.append(asyncio.create_task(self._clock.sleep(min(loading) - self._clock.monotonic())))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _release_aborted(self) -> None:
        for live in [live for live in self._live.values() if live.is_aborted]:
            self._end(live, FinishReason.CANCEL)

    def _admit(self) -> None:
        """First come, first served, while there is room in the step, and for the prompt and its first token."""
        now_s = self._clock.monotonic()
        room = self._model.max_cached_tokens - self._cached_tokens()
        step_tokens = self._model.max_step_tokens
        step_tokens -= sum(live.uncomputed_tokens for live in self._running if live.loaded_at_s <= now_s)
        while self._waiting and step_tokens > 0 and len(self._running) < self._model.max_running_requests:
            room -= len(self._waiting[0].token_ids) + 1
            if room < 0:
                return
            live = self._waiting.popleft()
            self._running.append(live)
            self._load_hit(live)
            if live.loaded_at_s <= now_s:
                step_tokens -= live.uncomputed_tokens

    def _load_hit(self, live: LiveRequest) -> None:
        """Take from the store what it has; the last token is always computed, so that there is a next one."""
        block_tokens = self._model.block_tokens
        keys = live.keys(self._model.pool, block_tokens, len(live.token_ids) - 1)
        hit_blocks = 0 if self._faults.loses_store() else self._store.match(keys)
        moved_bytes = 0
        if hit_blocks and self._faults.breaks_load(live.request.request_id):
            self._failed_loads += 1
            hit_blocks = 0
        elif hit_blocks:
            loaded = self._store.load(keys[:hit_blocks])
            hit_blocks, moved_bytes = loaded.blocks, loaded.moved_bytes
        live.computed_tokens = hit_blocks * block_tokens
        live.stored_blocks = hit_blocks
        live.loaded_at_s = self._clock.monotonic() + self._timing.load_s(moved_bytes)
        if not live.is_hit_told:
            live.is_hit_told = True
            live.steps.tell_hit(live.computed_tokens)

    def _batch(self) -> list[tuple[LiveRequest, int]]:
        """Who computes how many tokens in the next step: decoding requests first, then prompts in turn."""
        self._make_room()
        now_s = self._clock.monotonic()
        ready = [live for live in self._running if live.loaded_at_s <= now_s]
        batch = [(live, 1) for live in ready if live.is_decoding]
        budget = self._model.max_step_tokens - len(batch)
        for live in ready:
            tokens = min(budget, live.uncomputed_tokens)
            if not live.is_decoding and tokens:
                batch.append((live, tokens))
                budget -= tokens
        return batch

    def _make_room(self) -> None:
        """When answers outgrow KV memory the youngest request waits again and computes again later."""
        while self._cached_tokens() + len(self._running) > self._model.max_cached_tokens and len(self._running) > 1:
            live = self._running.pop()
            live.computed_tokens = 0
            self._waiting.appendleft(live)

    def _advance(self, live: LiveRequest, tokens: int) -> None:
        live.computed_tokens += tokens
        self._store_whole_blocks(live)
        if live.computed_tokens < len(live.token_ids):
            return
        try:
            token_id = live.choose()
        except RequestRefused as refusal:
            live.steps.fail(refusal)
            self._release(live)
            return
        if token_id in live.stop_token_ids:
            self._end(live, FinishReason.STOP, token_id)
            return
        live.chain.add(token_id)
        live.token_ids.append(token_id)
        alternatives = live.request.sampling.logprobs
        logprobs = None
        if alternatives is not None:
            logprobs = invented_logprobs(token_id, alternatives, self._model.vocabulary_tokens)
        live.steps.add(token_id, logprobs)
        if live.answer_tokens >= live.max_tokens or len(live.token_ids) >= self._model.max_context_tokens:
            self._end(live, FinishReason.LENGTH)

    def _store_whole_blocks(self, live: LiveRequest) -> None:
        """Of the prompt and of the answer alike: the next turn of a conversation hits both."""
        blocks = live.computed_tokens // self._model.block_tokens
        if blocks > live.stored_blocks:
            keys = live.keys(self._model.pool, self._model.block_tokens, live.computed_tokens, live.stored_blocks)
            live.stored_blocks = blocks
            if not self._faults.loses_store():
                self._store.store(keys)

    def _end(self, live: LiveRequest, reason: FinishReason, stop_token_id: int | None = None) -> None:
        if not live.is_hit_told:
            live.steps.tell_hit(0)
        live.steps.finish(reason, stop_token_id)
        self._release(live)

    def _release(self, live: LiveRequest) -> None:
        live.is_over = True
        del self._live[live.request.request_id]
        if live in self._running:
            self._running.remove(live)
        elif live in self._waiting:
            self._waiting.remove(live)
