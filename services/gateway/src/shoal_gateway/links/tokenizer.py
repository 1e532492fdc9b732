"""The tokenizers: Encode by unary calls, events over one long-lived stream each.

A request is encoded before its model is known, because only a tokenizer reads bodies: where several models are
served, their tokenizers are asked in turn until one knows the model. A stream goes to the one with the fewest.
docs/decisions/0013-tokens-travel-in-batches.md
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from shoal_contracts.errors import ERRORS, ShoalError, Unavailable, from_failure
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import fleet_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from shoal_gateway.links.peers import Channels, spawn_if_open, usable
from shoal_gateway.links.wire import split_events, to_encode_request, to_encoded, to_finish_stream, to_open_stream
from shoal_gateway.ports import Ending, EventSink
from shoal_gateway.request import TOKEN_BYTES, BodyToEncode, HistoryNeeded, Opening, Prompt, TokenBatch
from shoal_gateway.silence import SilentPeers
from shoal_runtime.clock import Clock
from shoal_runtime.grpc import call, connect
from shoal_runtime.presence import QUIET_AFTER_S, Fleet, Member
from shoal_runtime.process import Process
from shoal_runtime.streams import DuplexStream, TurnWriter

if TYPE_CHECKING:
    from shoal_contracts.v1.tokenizer_pb2_grpc import TokenizerAsyncStub as _Stub

Reply = TypeVar("Reply")
_Method: TypeAlias = Callable[..., Awaitable[Reply]]

DROP_BYTES = 4
TOKENS_OVERHEAD_BYTES = 8
SILENT_TOKENIZERS = 2  # that one body may wait for, the whole of its deadline
MAX_CALLS = 128  # of this gateway at once: more would wait in the tokenizers, where gRPC drops what is too much
CLOSE_AFTER_CALLS = 2  # deadlines of a call, for the channel of a tokenizer that left


@dataclass(frozen=True, slots=True)
class _Tokens:
    stream_id: int
    batch: TokenBatch


_Item = tokenizer_pb2.OpenStream | _Tokens | tokenizer_pb2.FinishStream | int  # an int is a stream to drop


class TokenizerStream:
    """One request's stream; see ``ports.EventStream``."""

    def __init__(self, link: "_TokenizerConnection", stream_id: int, sink: EventSink) -> None:
        self._link = link
        self._stream_id = stream_id
        self.sink = sink

    @property
    def instance(self) -> str:
        return self._link.instance

    def send(self, batch: TokenBatch) -> None:
        self._link.send(self._stream_id, _Tokens(self._stream_id, batch))

    def finish(self, ending: Ending) -> None:
        self._link.send(self._stream_id, to_finish_stream(self._stream_id, ending))

    def drop(self) -> None:
        self._link.drop(self._stream_id)


class _TokenizerConnection:
    """One connection to one incarnation of a tokenizer."""

    def __init__(self, member: Member, clock: Clock, give_up: Callable[["_TokenizerConnection"], None]) -> None:
        self.instance_id = member.instance_id
        self.instance = _instance(member)
        self._give_up = give_up
        self._streams: dict[int, TokenizerStream] = {}
        self._numbers = itertools.count(1)
        self._clock = clock
        self._heard_s = clock.monotonic()
        self._channel = connect(member.address)
        writer: TurnWriter[_Item] = TurnWriter(_build, weigh=_weigh)
        self._stream: DuplexStream[_Item, tokenizer_pb2.ConverseReply] = DuplexStream(
            tokenizer_pb2_grpc.TokenizerStub(self._channel).Converse,
            writer,
            on_reply=self._on_reply,
            on_lost=self._on_lost,
        )

    @property
    def is_open(self) -> bool:
        return self._stream.is_open

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def give_up_if_quiet(self) -> None:
        """Its tokenizer does not beat any more."""
        if self._clock.monotonic() - self._heard_s >= QUIET_AFTER_S:
            self._stream.give_up(Unavailable(pb.PEER_SILENT, "a tokenizer stands still; try again"))

    def open(self, opening: Opening, sink: EventSink) -> TokenizerStream:
        stream_id = next(self._numbers)
        stream = self._streams[stream_id] = TokenizerStream(self, stream_id, sink)
        self._stream.send(to_open_stream(stream_id, opening))
        return stream

    def send(self, stream_id: int, item: _Item) -> None:
        if stream_id in self._streams:
            self._stream.send(item)

    def drop(self, stream_id: int) -> None:
        if self._streams.pop(stream_id, None) is not None:
            self._stream.send(stream_id)

    async def close(self) -> None:
        await self._stream.close()
        await self._channel.close()

    def _on_reply(self, reply: tokenizer_pb2.ConverseReply) -> None:
        self._heard_s = self._clock.monotonic()
        for stream_id, events, parsed_tokens, event_count in split_events(reply):
            if (stream := self._streams.get(stream_id)) is not None:
                stream.sink.on_events(events, parsed_tokens, event_count)
        for stopped in reply.stopped:
            if (stream := self._streams.get(stopped.stream_id)) is not None:
                stream.sink.on_stopped()
        for closed in reply.closed:
            if (stream := self._streams.pop(closed.stream_id, None)) is not None:
                stream.sink.on_closed(
                    closed.completion_tokens, closed.kept_body if closed.HasField("kept_body") else None
                )
        for failed in reply.failed:
            if (stream := self._streams.pop(failed.stream_id, None)) is not None:
                stream.sink.on_failed(from_failure(failed.failure))

    def _on_lost(self, error: ShoalError) -> None:
        self._give_up(self)  # first: the streams look for another one
        streams, self._streams = self._streams, {}
        lost = Unavailable(pb.UNAVAILABLE, "the connection to a tokenizer broke; try again")
        for stream in streams.values():
            stream.sink.on_failed(lost)


class TokenizerLinks:
    """See ``ports.TokenizerFleet``."""

    def __init__(self, process: Process, fleet: Fleet, encode_s: float) -> None:
        self._process = process
        self._fleet = fleet
        self._encode_s = encode_s
        self._channels = Channels(process, fleet, fleet_pb2.TOKENIZER, CLOSE_AFTER_CALLS * encode_s)
        self._links: dict[str, _TokenizerConnection] = {}
        self._silent = SilentPeers("tokenizer", process.clock)
        self._calls = asyncio.Semaphore(MAX_CALLS)
        fleet.on_change(self._on_change)
        process.stack.push_async_callback(self.close)

    async def encode(self, work: BodyToEncode) -> Prompt | HistoryNeeded:
        async with self._calls:
            return to_encoded(await self._ask(work, lambda stub: stub.Encode))

    async def count(self, work: BodyToEncode) -> bytes:
        async with self._calls:
            return (await self._ask(work, lambda stub: stub.Count)).body

    async def _ask(self, work: BodyToEncode, choose: Callable[["_Stub"], _Method[Reply]]) -> Reply:
        """Another tokenizer is asked where that may help, while time is left: a body that silences one may silence
        all. Raises the last error."""
        request = to_encode_request(work, created_s=int(self._process.clock.now()))
        error: ShoalError = Unavailable(pb.UNAVAILABLE, "no tokenizer is ready; try again", retry_after_s=1)
        clock = self._process.clock
        until_s = clock.monotonic() + SILENT_TOKENIZERS * self._encode_s
        strangers: set[str] = set()  # models of which a tokenizer said that the body names another one
        for member in self._by_load():
            name = _model_name(member)
            left_s = until_s - clock.monotonic()
            if left_s <= 0:
                break
            if name in strangers:
                continue
            stub = tokenizer_pb2_grpc.TokenizerStub(self._channels.get(member))
            try:
                return await call(choose(stub), request, timeout_s=min(self._encode_s, left_s))
            except ShoalError as failed:
                error = failed
                if isinstance(failed, Unavailable):
                    self._silent.note(_instance(member))
                if failed.code == pb.MODEL_NOT_FOUND:
                    strangers.add(name)
                elif not ERRORS[failed.code].is_retried:
                    raise
        raise error

    def open(self, opening: Opening, sink: EventSink, *, avoid: frozenset[str]) -> TokenizerStream:
        serving = [member for member in self._by_load() if _model_name(member) == opening.model]
        serving = [member for member in serving if _instance(member) not in avoid]
        if not serving:
            raise Unavailable(pb.UNAVAILABLE, "no tokenizer of the model is ready; try again", retry_after_s=1)
        member = serving[0]
        link = self._links.get(member.instance_id)
        if link is None or not link.is_open or link.instance != _instance(member):
            if link is not None and link.is_open and not link.open_streams:
                self._close_later(link)
            link = self._links[member.instance_id] = _TokenizerConnection(member, self._process.clock, self._on_lost)
        return link.open(opening, sink)

    async def close(self) -> None:
        for link in list(self._links.values()):
            await link.close()
        self._links.clear()
        await self._channels.close()

    def _by_load(self) -> list[Member]:
        by_load = sorted(usable(self._fleet, fleet_pb2.TOKENIZER), key=self._open_streams)
        return self._silent.last(by_load, _instance)

    def _open_streams(self, member: Member) -> int:
        link = self._links.get(member.instance_id)
        return link.open_streams if link is not None else 0

    def _on_change(self) -> None:
        for instance_id, link in list(self._links.items()):
            if self._fleet.get(instance_id) is not None:
                continue
            if link.open_streams:
                link.give_up_if_quiet()
            else:
                self._close_later(link)

    def _on_lost(self, link: _TokenizerConnection) -> None:
        self._silent.note(link.instance)
        self._close_later(link)

    def _close_later(self, link: _TokenizerConnection) -> None:
        if self._links.get(link.instance_id) is link:
            del self._links[link.instance_id]
        spawn_if_open(self._process, link.close(), "tokenizer_link_close")


def _instance(member: Member) -> str:
    return f"{member.instance_id}/{member.incarnation}"


def _model_name(member: Member) -> str:
    return member.model.name if member.model is not None else ""


def _build(items: Sequence[_Item]) -> Iterable[tokenizer_pb2.ConverseRequest]:
    """Within one message: opens, then tokens, then ends, then drops; the order in which each stream has them."""
    request = tokenizer_pb2.ConverseRequest()
    tokens: dict[int, bytearray] = {}
    logprobs: dict[int, list[bytes]] = {}
    drops = []
    for item in items:
        if isinstance(item, _Tokens):
            tokens.setdefault(item.stream_id, bytearray()).extend(item.batch.token_ids)
            if item.batch.logprobs:
                logprobs.setdefault(item.stream_id, []).extend(item.batch.logprobs)
        elif isinstance(item, int):
            drops.append(item)
        elif isinstance(item, tokenizer_pb2.OpenStream):
            request.open.append(item)
        else:
            request.finish.append(item)
    request.stream_ids = pack_u32(tokens)
    request.counts = pack_u32(len(packed) // TOKEN_BYTES for packed in tokens.values())
    request.token_ids = b"".join(tokens.values())
    for stream_id, entries in logprobs.items():
        told = request.logprobs.add(stream_id=stream_id)
        told.tokens.extend(pb.TokenLogprobs.FromString(entry) for entry in entries)
    request.drop = pack_u32(drops)
    yield request


def _weigh(item: _Item) -> int:
    if isinstance(item, _Tokens):
        batch = item.batch
        return TOKENS_OVERHEAD_BYTES + len(batch.token_ids) + sum(map(len, batch.logprobs))
    return DROP_BYTES if isinstance(item, int) else item.ByteSize()
