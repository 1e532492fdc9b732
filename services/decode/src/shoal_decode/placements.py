"""Everything that is placed on this worker: takes or refuses placements, and empties itself when it leaves.

The one owner of running streams, whichever RPC they came by. Occupancy counts a request from its acceptance on,
before the engine knows it, so that a burst within one turn of the loop is judged rightly.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from shoal_decode.acceptance import Asked, Limits, Occupancy, Refusal, judge
from shoal_decode.token_stream import Placement, StreamSink, TokenStream
from shoal_engine.api import Engine

Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Placements:
    """Used on one event loop. ``spawn`` runs a stream in the background."""

    def __init__(self, engine: Engine, limits: Limits, spawn: Spawn) -> None:
        self.limits = limits
        self._engine = engine
        self._spawn = spawn
        self._streams: set[TokenStream] = set()
        self._serial = itertools.count(1)
        self._is_leaving = False
        self._emptied = asyncio.Event()

    def place(self, placement: Placement, sink: StreamSink) -> TokenStream | Refusal:
        """Take the placement and start it, or say why not; then the sink hears nothing."""
        asked = Asked(placement.pool, placement.tokens, placement.is_local_prefill)
        refusal = judge(asked, self.occupancy(), self.limits)
        if refusal is not None:
            return refusal
        # The engine may still be busy with the end of an earlier stream of the same request.
        engine_id = f"{placement.request.request_id}.{next(self._serial)}"
        stream = TokenStream(
            self._engine, replace(placement, request=replace(placement.request, request_id=engine_id)), sink
        )
        self._streams.add(stream)
        self._spawn(self._run(stream))
        return stream

    async def _run(self, stream: TokenStream) -> None:
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)
            if not self._streams:
                self._emptied.set()

    def occupancy(self) -> Occupancy:
        """What runs now."""
        return Occupancy(
            running_requests=len(self._streams),
            cached_tokens=sum(stream.cached_tokens for stream in self._streams),
            local_prefill_tokens=sum(
                stream.placement.tokens
                for stream in self._streams
                if stream.placement.is_local_prefill and stream.hit_tokens is None
            ),
            is_leaving=self._is_leaving,
        )

    def leave(self) -> None:
        """Take nothing new from now on."""
        self._is_leaving = True

    async def drain(self) -> None:
        """Return when nothing runs any more; the caller bounds the wait."""
        self.leave()
        while self._streams:
            self._emptied.clear()
            await self._emptied.wait()
