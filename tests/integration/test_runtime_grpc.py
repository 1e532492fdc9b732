"""The runtime's gRPC on real sockets: limits, deadlines, typed errors, traces, batched streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shoal_contracts.errors import BadRequest, Bug, Refused, ShoalError, Unavailable
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import decode_pb2, decode_pb2_grpc, kvindex_pb2, kvindex_pb2_grpc
from shoal_runtime import tracing
from shoal_runtime.grpc import GRPC_MESSAGE_BYTES, call, connect, create_server, serve, to_shoal_error
from shoal_runtime.http import serve_ops
from shoal_runtime.metrics import Catalogue
from shoal_runtime.process import Process, new_process
from shoal_runtime.servers import http_answers
from shoal_runtime.settings import ServiceSettings
from shoal_runtime.streams import DuplexStream, TurnWriter, serve_stream


class _Index(kvindex_pb2_grpc.KvIndexServicer):
    """Answers by the pool's name."""

    async def Match(self, request: kvindex_pb2.MatchRequest, context: object) -> kvindex_pb2.MatchReply:  # type: ignore[override]
        if request.pool == "bug":
            raise KeyError("secret prompt text")
        if request.pool == "slow":
            await asyncio.sleep(30)
        if request.pool == "full":
            raise Refused(pb.OVERLOADED, "the index is full", retry_after_s=2)
        if request.pool == "trace":
            carrier: dict[str, str] = {}
            tracing.inject(carrier)
            assert carrier["traceparent"].split("-")[1] == "0af7651916cd43dd8448eb211c80319c"
        return kvindex_pb2.MatchReply(hit_blocks=len(request.block_hashes) // 4)


@dataclass
class _Decode(decode_pb2_grpc.DecodeServicer):
    """Accepts every placement; counts streams that ended."""

    ended: int = 0
    batches: list[list[int]] = field(default_factory=list)

    async def Serve(self, requests: AsyncIterator[decode_pb2.ServeRequest], context: object) -> None:  # type: ignore[override]
        writer = TurnWriter[decode_pb2.Accepted](lambda accepted: [decode_pb2.ServeReply(accepted=accepted)])

        def place(request: decode_pb2.ServeRequest) -> None:
            self.batches.append([placed.stream_id for placed in request.place])
            for placed in request.place:
                if placed.stream_id == 0:
                    raise BadRequest(pb.INVALID_REQUEST, "stream id 0 is not a stream")
                writer.put(decode_pb2.Accepted(stream_id=placed.stream_id))

        try:
            await serve_stream(requests, context, writer, place)
        finally:
            self.ended += 1

    async def Generate(self, request: object, context: object) -> AsyncIterator[decode_pb2.GenerateReply]:  # type: ignore[override]
        yield decode_pb2.GenerateReply(token_ids=b"abcd")
        raise Unavailable(pb.ENGINE_FAILED, "the engine failed")


@dataclass
class _Served:
    process: Process
    address: str
    channel: grpc.aio.Channel
    decode: _Decode
    server: grpc.aio.Server

    @property
    def index(self) -> kvindex_pb2_grpc.KvIndexAsyncStub:
        return kvindex_pb2_grpc.KvIndexStub(self.channel)


@pytest.fixture
async def served() -> AsyncIterator[_Served]:
    process = new_process("probe", ServiceSettings())
    server, decode = create_server(process), _Decode()
    kvindex_pb2_grpc.add_KvIndexServicer_to_server(_Index(), server)
    decode_pb2_grpc.add_DecodeServicer_to_server(decode, server)
    address = await serve(process, server)
    async with connect(address) as channel:
        yield _Served(process, address, channel, decode, server)
    await process.tasks.close()
    await process.stack.aclose()


async def _match_fails(served: _Served, pool: str, timeout_s: float = 5.0) -> ShoalError:
    with pytest.raises(ShoalError) as caught:
        await call(served.index.Match, kvindex_pb2.MatchRequest(pool=pool), timeout_s=timeout_s)
    return caught.value


async def test_a_message_of_a_million_tokens_passes(served: _Served) -> None:
    request = kvindex_pb2.MatchRequest(block_hashes=pack_u32(range(1_000_000)))
    assert (await call(served.index.Match, request, timeout_s=10)).hit_blocks == 1_000_000


async def test_a_message_over_the_limit_is_a_typed_refusal(served: _Served) -> None:
    request = kvindex_pb2.MatchRequest(block_hashes=bytes(GRPC_MESSAGE_BYTES))
    with pytest.raises(BadRequest, match="over the limit"):
        await call(served.index.Match, request, timeout_s=10)


async def test_a_shoal_error_arrives_as_it_was_raised(served: _Served) -> None:
    error = await _match_fails(served, "full")
    assert isinstance(error, Refused)
    assert (error.code, error.message, error.retry_after_s) == (pb.OVERLOADED, "the index is full", 2.0)


@pytest.mark.logs_error("rpc.crashed")
async def test_an_unknown_exception_is_a_bug_and_its_text_stays_here(served: _Served) -> None:
    error = await _match_fails(served, "bug")
    assert isinstance(error, Bug) and "secret" not in error.message


async def test_a_deadline_that_passes_is_a_silent_peer(served: _Served) -> None:
    error = await _match_fails(served, "slow", timeout_s=0.1)
    assert isinstance(error, Unavailable) and error.code == pb.PEER_SILENT


async def test_nobody_there_is_unavailable() -> None:
    async with connect("127.0.0.1:1") as channel:
        with pytest.raises(Unavailable):
            await call(kvindex_pb2_grpc.KvIndexStub(channel).Match, kvindex_pb2.MatchRequest(), timeout_s=5)


async def test_a_proxy_that_is_set_for_the_outside_is_not_asked(
    served: _Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    request = kvindex_pb2.MatchRequest(block_hashes=pack_u32([1]))
    async with connect(served.address) as channel:
        reply = await call(kvindex_pb2_grpc.KvIndexStub(channel).Match, request, timeout_s=10)
    assert reply.hit_blocks == 1


async def test_the_trace_reaches_the_handler(served: _Served) -> None:
    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with tracing.start_span("gateway", tracing.extract(parent)):
        await call(served.index.Match, kvindex_pb2.MatchRequest(pool="trace"), timeout_s=5)


async def test_an_error_after_the_first_reply_of_a_stream_is_typed_too(served: _Served) -> None:
    replies = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for reply in decode_pb2_grpc.DecodeStub(served.channel).Generate(decode_pb2.GenerateRequest()):
            replies.append(reply)
    assert len(replies) == 1
    assert to_shoal_error(caught.value).code == pb.ENGINE_FAILED


async def test_grpc_health_follows_readiness(served: _Served) -> None:
    stub = health_pb2_grpc.HealthStub(served.channel)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    served.process.health.set("engine", "failed")
    await asyncio.sleep(0.05)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_the_ops_port_answers(served: _Served) -> None:
    port = await serve_ops(served.process, Catalogue("shoal_probe"))
    assert await http_answers(port, "/readyz") and await http_answers(port, "/metrics")
    served.process.health.set("engine", "failed")
    assert await http_answers(port, "/healthz") and not await http_answers(port, "/readyz")


@dataclass
class _Heard:
    """A client's end with what it heard."""

    served: _Served
    accepted: list[int] = field(default_factory=list)
    lost: list[ShoalError] = field(default_factory=list)

    def open(self) -> DuplexStream[decode_pb2.Place, decode_pb2.ServeReply]:
        writer = TurnWriter[decode_pb2.Place](lambda places: [decode_pb2.ServeRequest(place=places)])
        stub = decode_pb2_grpc.DecodeStub(self.served.channel)
        return DuplexStream(stub.Serve, writer, on_reply=self._hear, on_lost=self.lost.append)

    def _hear(self, reply: decode_pb2.ServeReply) -> None:
        self.accepted += [accepted.stream_id for accepted in reply.accepted]

    async def until_accepted(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.accepted) < count:
                await asyncio.sleep(0.01)

    async def until_lost(self) -> ShoalError:
        async with asyncio.timeout(5):
            while not self.lost:
                await asyncio.sleep(0.01)
        return self.lost[0]


async def test_what_is_sent_in_one_turn_is_one_message_and_is_answered(served: _Served) -> None:
    heard = _Heard(served)
    stream = heard.open()
    for stream_id in range(1, 101):
        stream.send(decode_pb2.Place(stream_id=stream_id))
    await heard.until_accepted(100)
    assert heard.accepted == list(range(1, 101))
    assert served.decode.batches == [list(range(1, 101))]
    await stream.close()
    await stream.close()
    await asyncio.sleep(0.1)
    assert heard.lost == [] and served.decode.ended == 1


async def test_a_stream_whose_server_ends_is_lost_once(served: _Served) -> None:
    heard = _Heard(served)
    stream = heard.open()
    stream.send(decode_pb2.Place(stream_id=1))
    await heard.until_accepted(1)
    await served.server.stop(0)
    assert isinstance(await heard.until_lost(), Unavailable)
    stream.send(decode_pb2.Place(stream_id=2))
    await stream.close()
    assert len(heard.lost) == 1 and not stream.is_open


async def test_a_stream_to_nobody_is_lost() -> None:
    async with connect("127.0.0.1:1") as channel:
        lost: list[ShoalError] = []
        writer = TurnWriter[decode_pb2.Place](lambda places: [decode_pb2.ServeRequest(place=places)])
        stub = decode_pb2_grpc.DecodeStub(channel)
        stream = DuplexStream(stub.Serve, writer, on_reply=lambda reply: None, on_lost=lost.append)
        async with asyncio.timeout(5):
            while not lost:
                await asyncio.sleep(0.01)
        assert isinstance(lost[0], Unavailable)
        await stream.close()


async def test_a_stream_ended_with_a_typed_error_says_which(served: _Served) -> None:
    heard = _Heard(served)
    stream = heard.open()
    stream.send(decode_pb2.Place(stream_id=0))
    error = await heard.until_lost()
    assert error.code == pb.INVALID_REQUEST
    await stream.close()


@pytest.mark.logs_error("stream.crashed")
async def test_a_listener_that_crashes_loses_the_stream_as_a_bug(served: _Served) -> None:
    def crash(reply: decode_pb2.ServeReply) -> None:
        raise RuntimeError("boom")

    lost: list[ShoalError] = []
    writer = TurnWriter[decode_pb2.Place](lambda places: [decode_pb2.ServeRequest(place=places)])
    stub = decode_pb2_grpc.DecodeStub(served.channel)
    stream = DuplexStream(stub.Serve, writer, on_reply=crash, on_lost=lost.append)
    stream.send(decode_pb2.Place(stream_id=1))
    async with asyncio.timeout(5):
        while not lost:
            await asyncio.sleep(0.01)
    assert isinstance(lost[0], Bug)
    await stream.close()
