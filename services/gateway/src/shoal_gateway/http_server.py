"""The public HTTP server: uvicorn's protocol inside this process's own life.

The process owns signals and logs. ``drain`` closes the listener and idle connections and waits for the rest. What
happens on one connection is in ``http_protocol``. asyncio and uvloop set TCP_NODELAY on every one they accept.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from shoal_contracts.errors import Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.http_protocol import HttpProtocol
from shoal_runtime.health import AsgiApp

BACKLOG = 2048
START_S = 5.0
IDLE_CONNECTION_S = 75
TELL_S = 0.5  # for cancelled requests to tell their clients
DRAIN_SHARE = 0.9  # of the process's own deadline: cancelled requests still cancel at their peers


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Started once; ``close`` may be called without ``drain``."""

    def __init__(self, host: str, port: int) -> None:
        self._listener = _listen(host, port)
        self.port = int(self._listener.getsockname()[1])
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, app: AsgiApp, drain_s: float) -> None:
        """Return when connections are accepted."""
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            log_config=None,
            # Every exception is caught and logged at the request boundary; what uvicorn adds are requests whose
            # connection we cut.
            log_level="critical",
            access_log=False,
            lifespan="off",
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=IDLE_CONNECTION_S,
            timeout_graceful_shutdown=max(1, int(DRAIN_SHARE * drain_s)),
        )
        self._server = server = _Server(config)
        self._serving = asyncio.get_running_loop().create_task(
            server.serve(sockets=[self._listener]), name="http_server"
        )
        async with asyncio.timeout(START_S):
            while not server.started:
                await asyncio.sleep(0.005)

    async def drain(self) -> None:
        """Accept nothing new; return when the running requests have been answered, or cancelled for taking longer."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving})
            await self._await_told()

    async def close(self) -> None:
        """End what still runs."""
        if self._server is None or self._serving is None:
            self._listener.close()
        else:
            self._server.should_exit = self._server.force_exit = True
            for request in list(self._server.server_state.tasks):
                if not request.cancelling():
                    request.cancel()
            await asyncio.wait({self._serving})
            await self._await_told()

    async def _await_told(self) -> None:
        """Cancelled requests tell their clients so."""
        if self._server is not None and self._server.server_state.tasks:
            await asyncio.wait(set(self._server.server_state.tasks), timeout=TELL_S)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise Unavailable(
            pb.UNAVAILABLE,
            f"cannot listen on {host}:{port}: {error.strerror}. Stop what uses it, or set SHOAL_GATEWAY_PORT.",
        ) from error
    listener.setblocking(False)
    return listener
