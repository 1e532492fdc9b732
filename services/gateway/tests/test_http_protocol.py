"""One connection towards strangers, without a network: bytes in, bytes out."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from shoal_gateway.http_protocol import HttpProtocol

BODY = b'{"a":1}'
HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 7\r\n"
REQUEST = HEAD + b"\r\n" + BODY


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_closed = self.is_aborted = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class App:
    """Reads its body, waits until it may answer, and notes what it got."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.bodies: list[bytes] = []
        self.has_left = False

    async def __call__(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.has_left = True
                return
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        leaving = asyncio.ensure_future(receive())
        answering = asyncio.ensure_future(self.may_answer.wait())
        await asyncio.wait({leaving, answering}, return_when="FIRST_COMPLETED")
        self.has_left = leaving.done()
        leaving.cancel()
        answering.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


class ImpatientProtocol(HttpProtocol):
    patience_s = 0.01


class Connection:
    def __init__(self, protocol: type[HttpProtocol] = HttpProtocol) -> None:
        self.app = App()
        config = uvicorn.Config(self.app, lifespan="off", log_config=None, access_log=False, ws="none")
        self.protocol = protocol(config, ServerState(), {})
        self.transport = FakeTransport()
        self.protocol.connection_made(self.transport)

    async def feed(self, *parts: bytes) -> None:
        for part in parts:
            self.protocol.data_received(part)
            for _ in range(5):
                await asyncio.sleep(0)

    async def answer(self) -> bytes:
        self.app.may_answer.set()
        for _ in range(5):
            await asyncio.sleep(0)
        return self.transport.sent


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    made = Connection()
    yield made
    made.protocol.connection_lost(None)


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02", b"BREW / HTTP/1.1\r\n\r\n", b"CONNECT a:80 HTTP/1.1\r\n\r\n"])
async def test_what_is_no_http_is_told_in_the_shape_of_every_error(connection: Connection, garbage: bytes) -> None:
    await connection.feed(garbage)
    head, body = connection.transport.sent.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
    assert connection.transport.is_closed


async def test_a_broken_body_is_told_at_once(connection: Connection) -> None:
    await connection.feed(b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")
    assert connection.transport.sent.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("early", [REQUEST, REQUEST * 3, b"\x00garbage"])
async def test_what_comes_behind_a_running_request_is_dropped_and_the_answer_is_the_last(
    connection: Connection, early: bytes
) -> None:
    await connection.feed(REQUEST + early)
    await connection.feed(early)
    assert connection.transport.sent == b""
    sent = await connection.answer()
    assert sent.startswith(b"HTTP/1.1 200 OK\r\n") and sent.endswith(b"ok") and sent.count(b"HTTP/1.1") == 1
    assert connection.app.bodies == [BODY] and connection.transport.is_closed


async def test_a_client_that_sent_more_and_leaves_is_seen() -> None:
    connection = Connection()
    await connection.feed(REQUEST + REQUEST)
    connection.protocol.connection_lost(None)
    await connection.feed()
    await asyncio.sleep(0.01)
    assert connection.app.has_left


async def test_a_connection_is_used_again_after_its_answer(connection: Connection) -> None:
    connection.app.may_answer.set()
    await connection.feed(REQUEST, REQUEST)
    assert connection.transport.sent.count(b"HTTP/1.1 200 OK") == 2 and not connection.transport.is_closed


@pytest.mark.parametrize("cut_at", [10, len(HEAD) + 40, None])
async def test_an_offer_to_upgrade_is_ignored_and_its_body_read(connection: Connection, cut_at: int | None) -> None:
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n\r\n"
    request = HEAD + offer + BODY
    connection.app.may_answer.set()
    await connection.feed(*([request[:cut_at], request[cut_at:]] if cut_at else [request]), REQUEST)
    assert connection.app.bodies == [BODY, BODY]
    assert connection.transport.sent.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("sent", [b"", b"POST /x HT", HEAD, REQUEST + b"\r\n"])
async def test_who_does_not_go_on_is_cut(sent: bytes) -> None:
    connection = Connection(ImpatientProtocol)
    connection.app.may_answer.set()
    await connection.feed(*([sent] if sent != REQUEST + b"\r\n" else [REQUEST, b"\r\n"]))
    await asyncio.sleep(0.03)
    assert connection.transport.is_aborted


async def test_a_request_that_runs_is_not_cut() -> None:
    connection = Connection(ImpatientProtocol)
    await connection.feed(REQUEST)
    await asyncio.sleep(0.03)
    assert not connection.transport.is_closed
    assert (await connection.answer()).endswith(b"ok")
    connection.protocol.connection_lost(None)
