"""The HTTP edge without Shoal, a process of its own: the least that any gateway on uvicorn costs.

    python tests/bench/http_alone.py PORT

The same server loop, protocol and settings as the gateway's. A query says what to answer: ``events`` of ``bytes``
each, one a step of ``step_ms``, all streams in the same turn as from an engine; ``events=0``: one body of ``bytes``.
"""

import asyncio
import sys
from typing import Any
from urllib.parse import parse_qs

import uvicorn

EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Steps:
    """Wakes everyone who waits at the same time, as a step of an engine does."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    async def wait(self, step_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.create_future()
            loop.call_later(step_s, self._end)
        await self._next

    def _end(self) -> None:
        assert self._next is not None
        self._next.set_result(None)
        self._next = None


STEPS = Steps()


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, answers as the query says."""
    asked = {name: float(values[0]) for name, values in parse_qs(scope["query_string"].decode()).items()}
    while (await receive()).get("more_body"):
        pass
    events, size_bytes = int(asked["events"]), int(asked["bytes"])
    step_s = asked["step_ms"] / 1e3
    if not events:
        await STEPS.wait(step_s)
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % size_bytes)]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"x" * size_bytes})
        return
    event = b"data: " + b"x" * (size_bytes - 8) + b"\n\n"
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
    for number in range(1, events + 1):
        await STEPS.wait(step_s)
        await send({"type": "http.response.body", "body": event, "more_body": number < events})


if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
    )
