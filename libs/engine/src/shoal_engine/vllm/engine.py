"""``shoal_engine.api.Engine`` on vLLM's AsyncLLM: the life of the engine and of its requests.

All of it runs on one event loop. vLLM computes in a process of its own; starting and stopping it blocks, so both
happen in a thread. A request is in ``_active`` from its first await to its end, whatever that is, and leaves vLLM
by exactly one of: its last output, one abort, the death of the engine. vLLM is imported in ``start``, not here.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import httpx

from shoal_engine.api import (
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
)
from shoal_engine.settings import EngineRole, EngineSettings
from shoal_engine.vllm.environment import set_environment
from shoal_engine.vllm.prefetch import CALL_S, StorePrefetch
from shoal_runtime.clock import SystemClock
from shoal_runtime.logs import get_logger

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from shoal_engine.vllm.launch import Launched

log = get_logger(__name__)

CONNECTOR = "shoal_engine.vllm.lmcache:PooledConnector"


@dataclass
class _Active:
    """One request that vLLM has or is about to get."""

    cached_tokens: int
    is_cancelled: bool = False  # before vLLM knew it


class VllmEngine:
    """See ``shoal_engine.api``. ``connector`` names the class that stores and loads KV, as ``module:class``.

    ``role`` picks the section of a profile; without one only what is for every worker applies.
    """

    def __init__(self, settings: EngineSettings, *, role: EngineRole | None = None, connector: str = CONNECTOR) -> None:
        self._settings = settings
        self._role = role
        self._connector = connector
        self._active: dict[str, _Active] = {}
        self._launching: asyncio.Task[Launched] | None = None
        self._launched: Launched | None = None
        self._description: EngineDescription | None = None
        self._prefetch: StorePrefetch | None = None
        self._is_stopped = False
        self._has_died = False

    @property
    def description(self) -> EngineDescription:
        if self._description is None:
            raise EngineFailed("the engine is not started")
        return self._description

    async def start(self) -> None:
        self._launching = asyncio.create_task(asyncio.to_thread(_launch, self._settings, self._role, self._connector))
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                # Shielded: a thread cannot be cancelled, and ``stop`` must find what it made.
                self._launched = await asyncio.shield(self._launching)
                # vLLM asks its process for this with the first request, and would wait for ever for one that just died.
                await self._launched.llm.get_supported_tasks()
                groups = await _state_groups(self._settings, self._launched)
        except TimeoutError as exc:
            raise EngineFailed(f"vLLM did not start within {self._settings.start_timeout_s:g} s") from exc
        except _vllm_errors() as exc:
            raise EngineFailed(f"vLLM died while starting: {type(exc).__name__}") from exc
        self._description = EngineDescription(
            model=self._settings.shown_name,
            pool=self._launched.pool,
            block_tokens=self._settings.block_tokens,
            max_context_tokens=self._launched.model.max_context_tokens,
            max_running_requests=self._launched.max_running_requests,
            groups=groups,
            store_instance_id=await self._open_prefetch(self._launched, groups),
        )
        for sentinel in self._launched.sentinels:
            asyncio.get_running_loop().add_reader(sentinel, self._fail_all, self._launched)
        log.info("engine.started", pool=self._launched.pool, max_cached_tokens=self._launched.max_cached_tokens)

    async def prefill(self, request: EngineRequest) -> PrefillResult:
        one_token = replace(
            request.sampling, max_tokens=len(request.resumed_token_ids) + 1, logprobs=None, constraint=None
        )
        prompt_tokens = len(request.token_ids) + len(request.resumed_token_ids)
        async with aclosing(self.generate(replace(request, sampling=one_token))) as steps:
            async for step in steps:
                if step.finish is FinishReason.CANCEL:
                    raise asyncio.CancelledError
                # A stop token is no token of the answer: decode finds it by itself.
                hit_tokens = step.hit_tokens or 0
                first_token = step.token_ids[0] if step.token_ids else None
                return PrefillResult(hit_tokens, prompt_tokens - hit_tokens, first_token)
        raise EngineFailed("vLLM ended a prefill without a result")

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Step, None]:
        from shoal_engine.vllm import translation

        launched = self._serving()
        if request.request_id in self._active:
            raise ValueError(f"request id {request.request_id} is in use")
        translation.check_request(request, launched.model)
        max_tokens = translation.remaining_tokens(request, launched.model)
        if max_tokens == 0:
            yield Step(token_ids=(), hit_tokens=0, finish=FinishReason.LENGTH)
            return
        active = self._active[request.request_id] = _Active(len(request.token_ids) + len(request.resumed_token_ids))
        is_ended = False
        try:
            outputs = await self._submit(launched, request, max_tokens)
            if active.is_cancelled:
                await launched.llm.abort(request.request_id)
            is_first = True
            while not is_ended:
                output = outputs.get_nowait() or await outputs.get()
                step = translation.to_step(output, is_first=is_first, alternatives=request.sampling.logprobs)
                is_first, is_ended = False, step.finish is not None
                active.cached_tokens += len(step.token_ids)
                if is_ended:
                    self._forget(request.request_id, active)
                yield step
        except _vllm_errors() as exc:
            is_ended = True
            raise EngineFailed(f"vLLM failed a request: {type(exc).__name__}") from exc
        finally:
            self._forget(request.request_id, active)
            if not is_ended and not self._is_stopped:
                await launched.llm.abort(request.request_id)

    async def prefetch(self, request: EngineRequest) -> Prefetched:
        if self._prefetch is None or self._is_stopped or self.load().is_store_lost:
            return Prefetched()
        return await self._prefetch.bring(request)

    async def abort(self, request_id: str) -> None:
        active = self._active.get(request_id)
        if active is None or self._launched is None:
            return
        active.is_cancelled = True
        await self._launched.llm.abort(request_id)

    def load(self) -> EngineLoad:
        launched = self._launched
        lengths = [active.cached_tokens for active in self._active.values()]
        told = launched.watch.running_requests if launched else 0
        running = min(told or 0, len(lengths))
        return EngineLoad(
            running_requests=running,
            waiting_requests=len(lengths) - running,
            cached_tokens=sum(lengths[:running]),  # vLLM takes them in order of arrival
            max_cached_tokens=launched.max_cached_tokens if launched else None,
            failed_loads=launched.watch.failed_loads if launched else 0,
            is_store_lost=launched.watch.is_store_lost if launched else False,
            failed_prefetches=self._prefetch.failed if self._prefetch else 0,
        )

    async def check(self) -> None:
        self._serving()

    async def stop(self) -> None:
        if self._launching is None or self._is_stopped:
            self._is_stopped = True
            return
        self._is_stopped = True
        if self._prefetch is not None:
            await self._prefetch.close()
        await asyncio.wait([self._launching])
        if self._launching.exception() is not None:
            return  # told by ``start``; vLLM has cleaned up after itself
        launched = self._launching.result()
        self._unwatch(launched)
        if launched.is_alive and not self._has_died:
            for request_id in list(self._active):
                await self.abort(request_id)
        await asyncio.to_thread(launched.llm.shutdown)

    async def _open_prefetch(self, launched: "Launched", groups: tuple[StateGroup, ...]) -> str:
        """Returns the name of the node's store, when that can be asked."""
        settings = self._settings
        if not settings.store_port or not settings.store_http_port:
            return ""
        address = f"http://{settings.store_host}:{settings.store_http_port}"
        # trust_env off: a proxy that is set for the outside must not see the node's own traffic.
        http = httpx.AsyncClient(base_url=address, timeout=CALL_S, trust_env=False)
        self._prefetch = StorePrefetch(
            launched.pool, settings.block_tokens, http, SystemClock(), groups=groups, parts=launched.kv_parts
        )
        return await self._prefetch.store_instance_id()

    def _forget(self, request_id: str, active: _Active) -> None:
        # The id may be in use again already when a reader closes a stream late.
        if self._active.get(request_id) is active:
            del self._active[request_id]

    def _fail_all(self, launched: "Launched") -> None:
        # vLLM notices a killed engine process too, and lets the streams that wait for it wait for ever.
        self._has_died = True  # its process can still look alive for a moment
        self._unwatch(launched)
        log.error("engine.died", running_requests=len(self._active))
        launched.fail_all()

    def _unwatch(self, launched: "Launched") -> None:
        for sentinel in launched.sentinels:
            asyncio.get_running_loop().remove_reader(sentinel)

    def _serving(self) -> "Launched":
        if self._launched is None or self._is_stopped:
            raise EngineFailed("the engine is not running")
        if self._has_died or not self._launched.is_alive:
            raise EngineFailed("the engine process died")
        return self._launched

    async def _submit(self, launched: "Launched", request: EngineRequest, max_tokens: int) -> "RequestOutputCollector":
        from vllm.exceptions import VLLMClientError

        from shoal_engine.vllm import translation

        await _check_grammar(request.sampling.constraint)
        try:
            params = translation.to_sampling_params(
                request.sampling, max_tokens, launched.model, request.resumed_token_ids
            )
            return await launched.llm.add_request(request.request_id, translation.to_prompt(request), params)
        except (VLLMClientError, ValueError) as exc:
            raise RequestRefused(str(exc)) from exc


def _launch(settings: EngineSettings, role: EngineRole | None, connector: str) -> "Launched":
    set_environment(settings)
    try:
        from shoal_engine.vllm.launch import launch
    except ImportError as exc:
        raise EngineFailed(f"vLLM is not installed completely: {exc}") from exc
    return launch(settings, role, connector)


async def _check_grammar(constraint: str | None) -> None:
    """ConstraintRefused for what xgrammar cannot read: in vLLM's own process it would be found too late to say so."""
    if constraint is None:
        return
    from shoal_engine.grammar import check_grammar

    await check_grammar(constraint)


async def _state_groups(settings: EngineSettings, launched: "Launched") -> tuple[StateGroup, ...]:
    from shoal_engine.vllm.state_groups import DESCRIBE, from_rows

    if not settings.store_port:
        return ()
    [rows, *_] = await launched.llm.collective_rpc(DESCRIBE)  # every worker has the same groups
    groups = from_rows(rows)
    if any(group.kind is StateKind.SLIDING_WINDOW and not group.is_replayable for group in groups):
        from shoal_engine.vllm.lmcache import check_separation

        await asyncio.to_thread(check_separation, settings)
    return groups


def _vllm_errors() -> tuple[type[Exception], ...]:
    from vllm.exceptions import VLLMError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    return EngineDeadError, EngineGenerateError, VLLMError
