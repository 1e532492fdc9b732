"""Peers of a gateway that do what a test says: tokenizer and index here, workers in ``fake_workers``.

Each is a Service of its own process object inside the test's loop, over real gRPC and NATS. It announces itself,
records what it was asked, and has switches for going wrong. Tokens are numbers: the prompt's are the characters of
its messages, the answer's count up from ``FIRST_ANSWER_TOKEN``, so a lost or a repeated one shows. Events are one
line of JSON a token.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.descriptor import FieldDescriptor

from shoal_contracts.errors import BadRequest, ShoalError
from shoal_contracts.ids import pack_u32, unpack_u32
from shoal_contracts.v1 import (
    common_pb2,
    decode_pb2,
    fleet_pb2,
    kvindex_pb2,
    kvindex_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)
from shoal_kvblocks import split_hashes
from shoal_runtime.grpc import create_server, serve
from shoal_runtime.nats import NatsConnection, connect
from shoal_runtime.presence import Announcer, Load, Presence, Role, Served
from shoal_runtime.process import Process, Service, running
from shoal_runtime.settings import ServiceSettings
from shoal_runtime.streams import TurnWriter, serve_stream
from shoal_testkit import fake_responses

MODEL = "model-under-test"
BLOCK_TOKENS = 16
CONTEXT_TOKENS = 4096
FIRST_ANSWER_TOKEN = 1_000_000
ANSWER_TOKENS = 5
AWAIT_MARGIN_S = 0.05  # an index answers so long before the caller's deadline

Peer = TypeVar("Peer", bound=Service)


@contextlib.asynccontextmanager
async def peer_running(peer: Peer, nats_url: str, *, instance_id: str = "") -> AsyncIterator[Peer]:
    """A fake that is there until the end of the block."""
    settings = ServiceSettings.model_validate({"nats_url": nats_url, "instance_id": instance_id, "drain_s": 1})
    async with running(peer, settings):
        yield peer


@dataclass(slots=True)
class FakePeer:
    """What all fakes share. ``lose`` breaks every connection at once and stays away, without a last beat."""

    pool: str
    model: str = MODEL
    process: Process = field(init=False)
    nats: NatsConnection = field(init=False)
    server: grpc.aio.Server = field(init=False)
    address: str = field(init=False, default="")

    async def announce(self, process: Process, role: Role, address: str) -> None:
        self.process = process
        served = Served(self.model, self.pool, BLOCK_TOKENS, CONTEXT_TOKENS, ("all",))
        await Announcer(process, self.nats, role, lambda: Presence(address, served, self.load())).start()

    def load(self) -> Load | None:
        return None

    async def lose(self) -> None:
        await self.server.stop(0)

    async def drain(self) -> None:
        return


Message = TypeVar("Message", decode_pb2.ServeReply, tokenizer_pb2.ConverseReply)


def merged(replies: Sequence[Message]) -> Iterator[Message]:
    """One message of a turn. Columns are bytes, which protobuf would replace instead of appending."""
    whole = type(replies[0])()
    for reply in replies:
        whole.MergeFrom(reply)
    for column in whole.DESCRIPTOR.fields:
        if column.type == FieldDescriptor.TYPE_BYTES:
            setattr(whole, column.name, b"".join(getattr(reply, column.name) for reply in replies))
    yield whole


@dataclass(slots=True)
class _OpenAnswer:
    is_streaming: bool
    stop_token: int | None
    token_ids: list[int]
    prompt_tokens: int
    hit_tokens: int
    padding: str
    kept_as: str | None  # request id of a response that is to be kept
    is_stopped: bool = False


@dataclass(slots=True)
class FakeTokenizer(FakePeer):
    """``stop_token`` in a body stands for a stop string that the token completes; ``padding`` makes events heavy."""

    name: str = "tokenizer"
    encode_error: ShoalError | None = None
    encodes: list[tokenizer_pb2.EncodeRequest] = field(default_factory=list)
    openings: list[tokenizer_pb2.OpenStream] = field(default_factory=list)
    finishes: list[tokenizer_pb2.FinishStream] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    is_silent_at_end: bool = False

    async def start(self, process: Process) -> None:
        self.nats = await connect(process, process.settings.nats_url)
        self.server = create_server(process)
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(_TokenizerApi(self), self.server)  # type: ignore[abstract]  # Format stays unimplemented
        await self.announce(process, fleet_pb2.TOKENIZER, await serve(process, self.server))


class _TokenizerApi(tokenizer_pb2_grpc.TokenizerServicer):
    def __init__(self, fake: FakeTokenizer) -> None:
        self._fake = fake

    async def Encode(self, request: tokenizer_pb2.EncodeRequest, context: Any) -> tokenizer_pb2.EncodeReply:
        body = self._read(request)
        if body.get("previous_response_id") and not request.HasField("history"):
            return tokenizer_pb2.EncodeReply(needed_response_id=body["previous_response_id"])
        storage = fake_responses.storage(request, body)
        state = {
            "is_streaming": body.get("stream", False),
            "stop_token": body.get("stop_token"),
            "padding": body.get("padding", ""),
            "kept_as": request.request_id if storage is not None else None,
        }
        return tokenizer_pb2.EncodeReply(
            model=body["model"],
            token_ids=pack_u32(ord(letter) for letter in fake_responses.prompt_text(request, body)),
            sampling=common_pb2.Sampling(
                max_tokens=body.get("max_tokens"), logprobs=body.get("top_logprobs"), constraint=body.get("constraint")
            ),
            stream=body.get("stream", False),
            traffic_class=common_pb2.CHAT,
            output_state=json.dumps(state).encode(),
            notes=body.get("notes", ()),
            storage=storage,
        )

    async def Count(self, request: tokenizer_pb2.EncodeRequest, context: Any) -> tokenizer_pb2.CountReply:
        count = len(fake_responses.prompt_text(request, self._read(request)))
        return tokenizer_pb2.CountReply(prompt_tokens=count, body=json.dumps({"input_tokens": count}).encode())

    def _read(self, request: tokenizer_pb2.EncodeRequest) -> Any:
        self._fake.encodes.append(request)
        if self._fake.encode_error is not None:
            raise self._fake.encode_error
        try:
            body = json.loads(request.body)
        except ValueError:
            raise BadRequest(common_pb2.INVALID_REQUEST, "the body is not JSON") from None
        if body["model"] != self._fake.model:
            raise BadRequest(common_pb2.MODEL_NOT_FOUND, "no such model", param="model")
        return body

    async def Converse(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        answers: dict[int, _OpenAnswer] = {}
        writer: TurnWriter[tokenizer_pb2.ConverseReply] = TurnWriter(merged)
        await serve_stream(request_iterator, context, writer, lambda request: self._turn(request, answers, writer))

    def _turn(
        self,
        request: tokenizer_pb2.ConverseRequest,
        answers: dict[int, _OpenAnswer],
        writer: TurnWriter[tokenizer_pb2.ConverseReply],
    ) -> None:
        for opening in request.open:
            self._fake.openings.append(opening)
            state = json.loads(opening.output_state)
            prior = list(unpack_u32(opening.prior_token_ids))
            answers[opening.stream_id] = answer = _OpenAnswer(
                state["is_streaming"],
                state["stop_token"],
                prior,
                opening.prompt_tokens,
                opening.hit_tokens,
                state["padding"],
                state["kept_as"],
            )
            if answer.is_streaming and not opening.is_resumed:
                writer.put(_events(opening.stream_id, answer, [{"role": "assistant"}]))
        token_ids = iter(unpack_u32(request.token_ids))
        for stream_id, count in zip(unpack_u32(request.stream_ids), unpack_u32(request.counts), strict=True):
            batch = [next(token_ids) for _ in range(count)]
            if stream_id in answers:
                writer.put(_feed(stream_id, answers[stream_id], batch))
        for finish in request.finish:
            self._fake.finishes.append(finish)
            if not self._fake.is_silent_at_end and finish.stream_id in answers:
                writer.put(_close(finish, answers.pop(finish.stream_id)))
        for stream_id in unpack_u32(request.drop):
            self._fake.drops.append(stream_id)
            answers.pop(stream_id, None)


def _feed(stream_id: int, answer: _OpenAnswer, batch: Sequence[int]) -> tokenizer_pb2.ConverseReply:
    shown = []
    for token in batch:
        if answer.is_stopped:
            break
        if token == answer.stop_token:
            answer.is_stopped = True
            break
        answer.token_ids.append(token)
        shown.append({"token": token, "padding": answer.padding} if answer.padding else {"token": token})
    reply = tokenizer_pb2.ConverseReply()
    if answer.is_streaming and shown:
        reply = _events(stream_id, answer, shown)
    if answer.is_stopped:
        reply.stopped.add(stream_id=stream_id, stop_string="stop")
    return reply


def _events(stream_id: int, answer: _OpenAnswer, events: list[dict[str, Any]]) -> tokenizer_pb2.ConverseReply:
    written = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return tokenizer_pb2.ConverseReply(
        stream_ids=pack_u32([stream_id]),
        lengths=pack_u32([len(written)]),
        events=written,
        parsed_tokens=pack_u32([len(answer.token_ids)]),
        event_counts=pack_u32([len(events)]),
    )


def _close(finish: tokenizer_pb2.FinishStream, answer: _OpenAnswer) -> tokenizer_pb2.ConverseReply:
    end: dict[str, Any] = {
        "finish": common_pb2.FinishReason.Name(finish.reason),
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.token_ids),
        "cached_tokens": finish.hit_tokens if finish.HasField("hit_tokens") else answer.hit_tokens,
    }
    if finish.HasField("failure"):
        end["error"] = finish.failure.message
    if finish.HasField("receipt_json"):
        end["receipt"] = json.loads(finish.receipt_json)
    if answer.is_streaming:
        reply = _events(finish.stream_id, answer, [end])
        written = reply.events + b"data: [DONE]\n\n"
    else:
        reply = _events(finish.stream_id, answer, [])
        written = json.dumps({**end, "tokens": answer.token_ids}).encode()
    reply.events = written
    reply.lengths = pack_u32([len(written)])
    kept_body = None
    if answer.kept_as is not None:
        kept_body = fake_responses.response(answer.kept_as, fake_responses.STATUSES[finish.reason], answer.token_ids)
    reply.closed.add(stream_id=finish.stream_id, completion_tokens=len(answer.token_ids), kept_body=kept_body)
    return reply


@dataclass(slots=True)
class FakeKvIndex(FakePeer):
    """Says that ``hit_blocks`` are stored, of any prompt that has them; and what was given to ``store``.

    With ``is_sharing`` it tracks pending prefixes, as ``suites.kvindex`` demands of an index that does.
    """

    name: str = "kvindex"
    hit_blocks: int = 0
    is_sharing: bool = False
    stored: set[bytes] = field(default_factory=set)
    claims: dict[str, tuple[float, list[bytes]]] = field(default_factory=dict)  # until when, and which blocks
    has_stored: asyncio.Event = field(default_factory=asyncio.Event)
    error: ShoalError | None = None
    delay_s: float = 0.0
    matches: list[kvindex_pb2.MatchRequest] = field(default_factory=list)
    settles: list[kvindex_pb2.SettleRequest] = field(default_factory=list)

    async def start(self, process: Process) -> None:
        self.nats = await connect(process, process.settings.nats_url)
        self.server = create_server(process)
        kvindex_pb2_grpc.add_KvIndexServicer_to_server(_KvIndexApi(self), self.server)  # type: ignore[abstract]  # so do Explain and Overview
        self.address = await serve(process, self.server)
        await self.announce(process, fleet_pb2.KVINDEX, self.address)

    def store(self, hashes: bytes) -> None:
        """From now on these blocks are stored."""
        self.stored.update(split_hashes(hashes))
        self.has_stored.set()
        self.has_stored.clear()

    def hit(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks that are stored."""
        known = len(list(itertools.takewhile(self.stored.__contains__, hashes)))
        return max(known, min(self.hit_blocks, len(hashes)))

    def pending(self, hashes: Sequence[bytes], hit: int, request_id: str) -> kvindex_pb2.Pending | None:
        """Who else computes the block after the hit."""
        for owner, (until_s, claimed) in self.claims.items():
            if owner != request_id and until_s > self.process.clock.monotonic() and hashes[hit] in claimed:
                last = max(number for number, block_hash in enumerate(hashes) if block_hash in claimed)
                return kvindex_pb2.Pending(blocks=last + 1, request_id=owner)
        return None


class _KvIndexApi(kvindex_pb2_grpc.KvIndexServicer):
    def __init__(self, fake: FakeKvIndex) -> None:
        self._fake = fake

    async def Match(self, request: kvindex_pb2.MatchRequest, context: Any) -> kvindex_pb2.MatchReply:
        fake = self._fake
        fake.matches.append(request)
        await asyncio.sleep(fake.delay_s)
        if fake.error is not None:
            raise fake.error
        hashes = split_hashes(request.block_hashes)
        hit = fake.hit(hashes)
        if not fake.is_sharing or hit == len(hashes):
            return kvindex_pb2.MatchReply(hit_blocks=hit)
        pending = fake.pending(hashes, hit, request.request_id)
        if pending is None and request.claim_pending_ms:
            until_s = fake.process.clock.monotonic() + request.claim_pending_ms / 1000
            fake.claims[request.request_id] = (until_s, hashes[hit:])
        return kvindex_pb2.MatchReply(hit_blocks=hit, pending=pending)

    async def Await(self, request: kvindex_pb2.AwaitRequest, context: Any) -> kvindex_pb2.AwaitReply:
        if self._fake.error is not None:
            raise self._fake.error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(context.time_remaining() - AWAIT_MARGIN_S):
                while request.block_hash not in self._fake.stored:
                    await self._fake.has_stored.wait()
        return kvindex_pb2.AwaitReply(is_stored=request.block_hash in self._fake.stored)

    async def Settle(self, request: kvindex_pb2.SettleRequest, context: Any) -> kvindex_pb2.SettleReply:
        self._fake.settles.append(request)
        self._fake.claims.pop(request.request_id, None)
        return kvindex_pb2.SettleReply()
