"""The client's end: body, head, keep-alive, coalescing, bounds, and leaving."""

import asyncio
from typing import Any

import pytest

from shoal_contracts.errors import BadRequest, Interrupted, Refused
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.presence import KEEP_ALIVE, BodyRoom, ClientConnection, Outbox, PresenceLimits
from shoal_gateway.request import Api, Options
from shoal_testkit import settle, until


class Http:
    """The server's side of an ASGI exchange. ``is_blocked``: the client does not read."""

    def __init__(self, *body: bytes) -> None:
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for number, piece in enumerate(body, 1):
            self.incoming.put_nowait({"type": "http.request", "body": piece, "more_body": number < len(body)})
        self.sent: list[Any] = []
        self.readable = asyncio.Event()
        self.readable.set()
        self.is_cut = False
        self.options = Options("r1")

    def leave(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def send(self, message: Any) -> None:
        await self.readable.wait()
        self.sent.append(message)

    def cut(self) -> None:
        self.is_cut = True

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]

    def connection(self, **limits: Any) -> ClientConnection:
        usual: dict[str, Any] = {
            "max_body_bytes": 10,
            "body_wait_s": 1.0,
            "head_wait_s": 5.0,
            "keep_alive_s": 5.0,
            "max_pending_bytes": 100,
        }
        self.room = limits.pop("room", BodyRoom(1000))
        chosen = PresenceLimits(**{**usual, **limits})
        return ClientConnection(self.incoming.get, self.send, self.options, chosen, self.room, self.cut)


async def test_body_is_put_together() -> None:
    client = Http(b"abc", b"", b"def").connection()
    await client.read_body()
    assert client.body == b"abcdef"


async def test_bodies_share_a_room_until_they_are_released() -> None:
    room = BodyRoom(12)
    slow = Http()
    slow.incoming.put_nowait({"type": "http.request", "body": b"x" * 8, "more_body": True})
    sending, refused, whole = (http.connection(room=room) for http in (slow, Http(b"yyy", b"yy"), Http(b"yyyy")))
    reading = asyncio.create_task(sending.read_body())
    await until(lambda: room.bytes == 8)
    with pytest.raises(Refused) as raised:
        await refused.read_body()
    assert raised.value.code == pb.OVERLOADED
    refused.close()
    assert room.bytes == 8
    await whole.read_body()
    assert room.bytes == 12
    whole.release_body()
    whole.close()
    assert (room.bytes, whole.body) == (8, b"")
    slow.leave()
    with pytest.raises(Interrupted):
        await reading
    sending.close()
    assert room.bytes == 0


async def test_body_over_the_limit_is_refused_before_it_is_complete() -> None:
    http = Http(b"x" * 11, b"never read")
    with pytest.raises(BadRequest) as refused:
        await http.connection().read_body()
    assert refused.value.code == pb.REQUEST_TOO_LARGE
    assert http.incoming.qsize() == 1


async def test_body_that_does_not_come_ends_the_request() -> None:
    http = Http()
    http.incoming.put_nowait({"type": "http.request", "body": b"a", "more_body": True})
    with pytest.raises(BadRequest):
        await http.connection(body_wait_s=0.01).read_body()


async def test_client_that_leaves_while_sending_is_no_error() -> None:
    http = Http()
    http.leave()
    with pytest.raises(Interrupted):
        await http.connection().read_body()


async def test_work_of_a_client_that_left_is_cancelled_once() -> None:
    http, ends = Http(b""), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("end")

    client = http.connection()
    await client.read_body()
    running = asyncio.create_task(client.while_present(work()))
    await settle()
    http.leave()
    with pytest.raises(Interrupted) as left:
        await running
    assert left.value.code == pb.CANCELLED
    assert ends == ["end"]
    await client.fail(left.value)
    assert http.sent == []


async def test_what_work_raises_comes_through() -> None:
    async def work() -> None:
        raise Refused(pb.OVERLOADED, "full")

    with pytest.raises(Refused):
        await Http(b"").connection().while_present(work())


async def test_head_comes_with_the_first_event_and_ready_events_in_one_write() -> None:
    http = Http()
    client = http.connection()
    client.begin_events()
    await settle()
    assert http.sent == []
    client.put(b"one ")
    client.put(b"two")
    await settle()
    client.put(b"three")
    await client.end(None)
    assert http.sent[0]["status"] == 200
    assert (b"x-request-id", b"r1") in http.sent[0]["headers"]
    assert http.bodies == [b"one two", b"three"]
    assert [message["more_body"] for message in http.sent[1:]] == [True, False]


async def test_silence_is_filled_with_comments() -> None:
    http = Http()
    client = http.connection(head_wait_s=0.01, keep_alive_s=0.01)
    client.begin_events()
    await until(lambda: len(http.bodies) >= 3)
    client.put(b"event")
    await client.end(None)
    assert client.has_head
    assert set(http.bodies[:3]) == {KEEP_ALIVE}
    assert http.bodies[-1] in (b"event", b"")
    assert b"event" in http.bodies


async def test_too_much_for_a_client_that_does_not_read_cuts_it_off() -> None:
    http = Http()
    client = http.connection(max_pending_bytes=10)
    client.begin_events()
    client.put(b"first")
    await settle()
    http.readable.clear()
    client.put(b"12345")
    await settle()
    assert client.put(b"123456")
    assert not client.put(b"123456")
    await client.fail(Interrupted(pb.CANCELLED, "the client reads too slowly"))
    client.close()
    await settle()
    assert http.is_cut


async def test_whole_answer_is_written_at_its_end_however_long() -> None:
    http = Http()
    client = http.connection(max_pending_bytes=4)
    assert client.put(b"12345")
    assert client.put(b"67890")
    await client.end(b'{"outcome":"finished"}')
    assert (b"content-length", b"10") in http.sent[0]["headers"]
    assert (b"x-shoal-receipt", b'{"outcome":"finished"}') in http.sent[0]["headers"]
    assert http.bodies == [b"1234567890"]


async def test_error_before_the_head_is_a_response() -> None:
    http = Http()
    client = http.connection()
    client.begin_events()
    await client.fail(Refused(pb.OVERLOADED, "full", retry_after_s=2))
    client.close()
    await settle()
    assert http.sent[0]["status"] == 503
    assert (b"retry-after", b"2") in http.sent[0]["headers"]
    assert len(http.bodies) == 1


async def test_error_after_the_head_is_the_last_event() -> None:
    http = Http()
    client = http.connection()
    client.begin_events()
    client.put(b"data: 1\n\n")
    await settle()
    await client.fail(Refused(pb.OVERLOADED, "full"))
    assert b"".join(http.bodies).endswith(b"data: [DONE]\n\n")
    assert not http.sent[-1]["more_body"]


async def test_error_after_the_head_counts_the_events_before_it() -> None:
    http = Http()
    http.options = Options("r1", Api.RESPONSES)
    client = http.connection()
    client.begin_events()
    client.put(b"two events", 2)
    client.put(b"one event", 1)
    await settle()
    await client.fail(Refused(pb.OVERLOADED, "full"))
    assert b'"sequence_number":3' in http.bodies[-1]


async def test_anthropics_clients_find_the_request_id_where_they_look() -> None:
    http = Http()
    http.options = Options("r1", Api.MESSAGES)
    client = http.connection()
    await client.fail(Refused(pb.OVERLOADED, "full"))
    client.close()
    assert {(b"request-id", b"r1"), (b"x-request-id", b"r1")} <= set(http.sent[0]["headers"])
    assert b'"request_id":"r1"' in http.bodies[0]


async def test_outbox_gives_what_is_there_and_never_waits_for_more() -> None:
    outbox = Outbox(100)
    assert await outbox.take(0.001) == b""
    outbox.put(b"a")
    outbox.put(b"b")
    assert await outbox.take(60) == b"ab"
    outbox.put(b"c")
    outbox.close()
    assert await outbox.take(60) == b"c"
    assert await outbox.take(60) == b""
