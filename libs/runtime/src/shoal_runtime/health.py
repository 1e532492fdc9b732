"""Whether this process may be given work, and why not; and the small HTTP server that says so.

Each part of a service reports under its own name: ``set("model", "loading")`` makes the process unready,
``degrade("postgres", "away")`` only says so, for a fallback that lasts while requests are still served, and
``set(part, None)`` is fine again. /healthz answers 200 as long as the loop turns; /readyz 200 or 503 with the
reasons; /metrics the catalogues.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import msgspec

from shoal_runtime.logs import get_logger
from shoal_runtime.metrics import CONTENT_TYPE, Catalogue, exposition

log = get_logger(__name__)

LIFECYCLE = "process"  # the part that is not fine while a process starts and drains

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Health:
    """The reasons against readiness, by part. Used on one event loop; changes are logged once."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._degraded: set[str] = set()
        self._ordinary: set[str] = set()  # not fine because the process starts or drains: nothing to warn of
        self._waiters: list[asyncio.Future[None]] = []

    def set(self, part: str, reason: str | None) -> None:
        """``None``: the part is fine. Text: the process takes no work, for this reason."""
        self._change(part, reason, is_degraded=False)

    def degrade(self, part: str, reason: str) -> None:
        """The part is not fine, but work is taken and done without it; ``set(part, None)`` ends it."""
        self._change(part, reason, is_degraded=True)

    def _change(self, part: str, reason: str | None, *, is_degraded: bool) -> None:
        if self._reasons.get(part) == reason and (part in self._degraded) == is_degraded:
            return
        self._degraded.discard(part)
        if is_degraded:
            self._degraded.add(part)
        if reason is not None:
            self._ordinary.discard(part)
            if part == LIFECYCLE or LIFECYCLE in self._reasons:
                self._ordinary.add(part)
        write = log.info if part in self._ordinary else log.warning
        if reason is None:
            if self._reasons.pop(part, None) is not None:
                write("health.recovered", part=part)
        else:
            self._reasons[part] = reason
            write("health.degraded", part=part, reason=reason)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    @property
    def is_ready(self) -> bool:
        return self._reasons.keys() <= self._degraded

    @property
    def reason(self) -> str:
        """All reasons in one line; "" when every part is fine."""
        return "; ".join(f"{part}: {reason}" for part, reason in sorted(self._reasons.items()))

    @property
    def report(self) -> dict[str, str]:
        """A copy of the reasons by part."""
        return dict(self._reasons)

    def next_change(self) -> asyncio.Future[None]:
        """A future that is done after the next change."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters = [*(waiting for waiting in self._waiters if not waiting.done()), waiter]
        return waiter


def ops_app(health: Health, catalogues: Sequence[Catalogue]) -> AsgiApp:
    """The three pages as an ASGI application."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, content_type, body = _answer(scope["path"], health, catalogues)
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


def _answer(path: str, health: Health, catalogues: Sequence[Catalogue]) -> tuple[int, str, bytes]:
    if path == "/metrics":
        return 200, CONTENT_TYPE, exposition(catalogues)
    if path == "/healthz":
        return 200, "application/json", b'{"is_alive":true}'
    if path == "/readyz":
        body = msgspec.json.encode({"is_ready": health.is_ready, "reasons": health.report})
        return (200 if health.is_ready else 503), "application/json", body
    return 404, "application/json", b'{"error":"this port has /healthz, /readyz and /metrics"}'
