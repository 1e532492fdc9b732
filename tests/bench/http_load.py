"""A client that costs little: keep-alive connections, each one request after the other, answers kept as they came."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

ANSWER_S = 300.0
EVENT = b"data: "
TEXT = re.compile(rb'"content": ?"(?!")')


@dataclass(slots=True)
class Answer:
    """One response: its pieces with the seconds since the request was sent."""

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    @property
    def events(self) -> int:
        return self.body.count(EVENT)

    @property
    def first_text_s(self) -> float:
        """When the first event with text was there."""
        seen = b""
        for at_s, piece in self.pieces:
            seen += piece
            if TEXT.search(seen):
                return at_s
        raise ValueError(f"no text in {seen[:500]!r}")


class Connection(asyncio.Protocol):
    """One connection; the parser calls the ``on_`` methods."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._answer = Answer()
        self._done: asyncio.Future[None] | None = None
        self._sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionError("the server closed the connection"))

    def on_body(self, piece: bytes) -> None:
        self._answer.pieces.append((time.perf_counter() - self._sent_s, piece))

    def on_message_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()
        assert self._done is not None
        self._done.set_result(None)

    async def post(self, path: str, body: bytes) -> Answer:
        """The answer to one request; ConnectionError when it is no success."""
        self._answer = answer = Answer()
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        self._sent_s = time.perf_counter()
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(ANSWER_S):
            await self._done
        if answer.status != 200:
            raise ConnectionError(f"status {answer.status}: {answer.body[:500]!r}")
        return answer

    def close(self) -> None:
        self._transport.close()


@asynccontextmanager
async def connections(url: str, count: int) -> AsyncIterator[list[Connection]]:
    """Connections that stay open for all rounds."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    loop = asyncio.get_running_loop()
    opened: list[Connection] = []
    try:
        for _ in range(count):
            _, connection = await loop.create_connection(
                lambda: Connection(address.netloc), address.hostname, address.port
            )
            opened.append(connection)
        yield opened
    finally:
        for connection in opened:
            connection.close()


async def ask(opened: list[Connection], path: str, body: bytes, each: int = 1) -> list[Answer]:
    """``each`` requests on every connection, one after the other; all connections at the same time."""

    async def one_after_the_other(connection: Connection) -> list[Answer]:
        return [await connection.post(path, body) for _ in range(each)]

    answers = await asyncio.gather(*map(one_after_the_other, opened))
    return [answer for one in answers for answer in one]
