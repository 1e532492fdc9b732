"""What stands between real stores and kvindex, so that tests can lose, delay and reorder their reports.

Everything that comes in goes to the next instance on a ``ReportLine``, which decides its fate.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal_runtime.http import serve_on
from shoal_runtime.servers import LOOPBACK
from shoal_testkit.scripted_store import ReportLine

METHODS = ("GET", "POST", "PUT", "DELETE")


@asynccontextmanager
async def report_proxy(line: ReportLine) -> AsyncIterator[str]:
    """Yields its URL. An instance that is not there is answered for with 502."""

    async def forward(request: Request) -> Response:
        url = httpx.URL(scheme="http", host="kvindex", path=request.url.path)
        headers = {"content-type": request.headers.get("content-type", "application/json")}
        onward = httpx.Request(request.method, url, content=await request.body(), headers=headers)
        try:
            reply = await line.handle_async_request(onward)
            body = await reply.aread()
            await reply.aclose()
        except httpx.TransportError:
            return Response(status_code=502)
        return Response(body, reply.status_code, media_type="application/json")

    async with AsyncExitStack() as stack:
        stack.push_async_callback(line.aclose)
        app = Starlette(routes=[Route("/{path:path}", forward, methods=list(METHODS))])
        port = await serve_on(stack, app, LOOPBACK, 0)
        yield f"http://{LOOPBACK}:{port}"
