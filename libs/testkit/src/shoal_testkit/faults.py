"""Faults of the network: a gate in front of a server that can hang, break and heal its connections.

A process that dies is ``processes.RunningProcess.kill``; a link that neither answers nor breaks needs this. Clients
connect to ``gate.port`` instead of the server's own.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from shoal_runtime.servers import LOOPBACK

READ_BYTES = 1 << 16


class Gate:
    """Forwards TCP to ``target_port`` while it is open. Used on one event loop."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self._target_port = target_port
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._links: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, LOOPBACK, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def hang(self) -> None:
        """Nothing passes any more, and nobody is told: a switch that lost its way."""
        self._is_open.clear()

    def heal(self) -> None:
        """What waited passes, late."""
        self._is_open.set()

    async def cut(self) -> None:
        """Break every connection and refuse new ones; ``start`` opens again on the same port."""
        if self._server is not None:
            self._server.close()
            self._server = None
        links = list(self._links)
        for link in links:
            link.cancel()
        if links:
            await asyncio.wait(links)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        try:
            target_reader, target_writer = await asyncio.open_connection(LOOPBACK, self._target_port)
            with contextlib.closing(target_writer):
                await self._link((reader, target_writer), (target_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # either end broke, or the gate was cut: both sides are closed below
        finally:
            self._links.discard(link)
            writer.close()

    async def _link(self, *ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        """Both directions; one that ends closes the other."""
        pumps = [asyncio.create_task(self._pump(reader, writer), name="gate") for reader, writer in ways]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while received := await reader.read(READ_BYTES):
                await self._is_open.wait()
                writer.write(received)
                await writer.drain()


@contextlib.asynccontextmanager
async def a_gate(target_port: int) -> AsyncIterator[Gate]:
    """An open gate, cut at the end of the block."""
    gate = Gate(target_port)
    await gate.start()
    try:
        yield gate
    finally:
        await gate.cut()
