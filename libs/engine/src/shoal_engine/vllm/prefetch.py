"""Asks the node's ``lmcache server``, over its HTTP side, to bring stored blocks into its DRAM.

A prefetch is a favour to a request that waits: whatever goes wrong is counted and the request loads by itself later.
Start and end of an outage are logged once. A prefetch whose caller left is ended by the server alone and pins nothing,
but the server keeps its answer until somebody takes it: the next prefetch does.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import httpx

from shoal_contracts.ids import pack_u32
from shoal_engine.api import EngineRequest, Prefetched, StateGroup, StateKind
from shoal_kvblocks import identity_words
from shoal_runtime.clock import Clock
from shoal_runtime.logs import get_logger

log = get_logger(__name__)

PREFETCH_S = 30.0  # of one prompt, from the question to the last block
CALL_S = 5.0
POLL_EACH_S = 0.01
MAX_LEFT = 64  # answers to be taken later
MAX_TOKENS = 1_000_000  # of one question; the server refuses more
ODD_ANSWERS = (ArithmeticError, ValueError, KeyError, TypeError)
FAILURES = (httpx.HTTPError, TimeoutError, RuntimeError, *ODD_ANSWERS)  # RuntimeError: closed meanwhile


class StorePrefetch:
    """One for each engine; ``pool`` is the name under which it stores. One event loop.

    Of ``groups`` only windows matter: of those a prefetch brings the last blocks, of all others every block. ``parts``
    is how many objects one block of one group has, because that many workers divide it.
    """

    def __init__(
        self,
        pool: str,
        block_tokens: int,
        http: httpx.AsyncClient,
        clock: Clock,
        *,
        groups: Sequence[StateGroup] = (),
        parts: int = 1,
    ) -> None:
        self.failed = 0
        self._pool = pool
        self._block_tokens = block_tokens
        self._http = http
        self._clock = clock
        self._parts = parts
        self._windows = [
            math.ceil(group.window_tokens / block_tokens)
            for group in groups
            if group.kind is StateKind.SLIDING_WINDOW and not group.is_replayable
        ]
        self._left: dict[str, None] = {}
        self._is_failing = False

    async def store_instance_id(self) -> str:
        """The server's name at kvindex; empty when it does not tell."""
        try:
            async with asyncio.timeout(CALL_S):
                name = str((await self._answer("GET", "/config"))["mp"]["instance_id"])
        except FAILURES as failure:
            self._fail(failure)
            return ""
        self._recover()
        return name

    async def bring(self, request: EngineRequest) -> Prefetched:
        """Return when the server has what it could find. Raises nothing but CancelledError."""
        token_ids = self._whole_blocks(request)
        if not token_ids:
            return Prefetched()
        began_s = self._clock.monotonic()
        try:
            async with asyncio.timeout(PREFETCH_S):
                blocks = await self._bring(token_ids, request.cache_salt)
        except FAILURES as failure:
            self._fail(failure)
            return Prefetched()
        self._recover()
        return Prefetched(blocks, math.ceil(1000 * (self._clock.monotonic() - began_s)))

    async def close(self) -> None:
        """Idempotent."""
        await self._http.aclose()

    def _whole_blocks(self, request: EngineRequest) -> list[int]:
        """What an engine may load: it always computes the last token. Items stand in it as the store names them."""
        packed = pack_u32([*request.token_ids, *request.resumed_token_ids])
        words = identity_words(packed, request.items)
        loadable = min(MAX_TOKENS, max(0, len(words) - 1))
        return list(map(int, words[: loadable // self._block_tokens * self._block_tokens]))

    async def _bring(self, token_ids: list[int], cache_salt: str) -> int:
        body = {
            "model_name": self._pool,
            "world_size": self._parts,
            "token_ids": token_ids,
            "cache_salt": cache_salt,
        }
        answer = await self._answer("POST", "/cache/prefetches", body)
        if answer["status"] == "noop":
            return 0
        path = f"/cache/prefetches/{answer['request_id']}"
        try:
            await self._take_left()
            while answer["status"] != "completed":
                await self._clock.sleep(POLL_EACH_S)
                answer = await self._answer("GET", path)
        finally:
            if answer["status"] != "completed":
                self._leave(path)
        return self._blocks(answer["found_keys"], answer["total_keys"], len(token_ids) // self._block_tokens)

    def _blocks(self, found_objects: int, asked_objects: int, asked_blocks: int) -> int:
        # A model with several groups of layers has several objects a block.
        objects_per_block = asked_objects / asked_blocks
        if not self._windows:
            return math.ceil(found_objects / objects_per_block)
        full_objects = objects_per_block - self._parts * len(self._windows)
        lengths = range(asked_blocks, 0, -1)
        objects = (
            length * full_objects + self._parts * sum(min(window, length) for window in self._windows)
            for length in lengths
        )
        return next((length for length, needed in zip(lengths, objects, strict=True) if needed <= found_objects), 0)

    def _leave(self, path: str) -> None:
        self._left[path] = None
        if len(self._left) > MAX_LEFT:
            del self._left[next(iter(self._left))]

    async def _take_left(self) -> None:
        for path in tuple(self._left):
            reply = await self._http.get(path)
            if not reply.is_success or reply.json()["status"] != "pending":
                self._left.pop(path, None)

    async def _answer(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        reply = await self._http.request(method, path, json=body)
        reply.raise_for_status()
        return dict(reply.json())

    def _fail(self, failure: Exception) -> None:
        self.failed += 1
        if not self._is_failing:
            self._is_failing = True
            log.warning("prefetch.lost", error=type(failure).__name__)

    def _recover(self) -> None:
        if self._is_failing:
            self._is_failing = False
            log.warning("prefetch.found", failed=self.failed)
