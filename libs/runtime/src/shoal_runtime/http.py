"""An HTTP server inside a process that already has its loop, signals and logs.

uvicorn without its own signal handling: ``process.run`` owns the signals, and the exit stack closes the server.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn

from shoal_runtime.health import AsgiApp, ops_app
from shoal_runtime.metrics import RUNTIME, Catalogue

if TYPE_CHECKING:
    from shoal_runtime.process import Process

# Longer than any heartbeat that comes over it: a connection closed while a beat is on its way looks like an outage.
KEEP_ALIVE_S = 75
CLOSE_S = 5


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_http(process: "Process", app: AsgiApp, host: str, port: int) -> int:
    """Serve ``app`` until the process closes; returns the port (a free one for 0). OSError when it is taken."""
    return await serve_on(process.stack, app, host, port)


async def serve_on(stack: contextlib.AsyncExitStack, app: AsgiApp, host: str, port: int) -> int:
    """As ``serve_http``, for something that has a life of its own within the process: until ``stack`` unwinds."""
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=CLOSE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _Server(config)
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]), name="http")

    async def close() -> None:
        server.should_exit = True
        await task

    stack.push_async_callback(close)
    while not server.started and not task.done():
        await asyncio.sleep(0.005)
    return int(listener.getsockname()[1])


async def serve_ops(process: "Process", catalogue: Catalogue) -> int:
    """Serve /healthz, /readyz and /metrics on the settings' ``ops_port``; returns the port."""
    app = ops_app(process.health, [RUNTIME, catalogue])
    return await serve_http(process, app, process.settings.host, process.settings.ops_port)
