"""The decode workers: one long-lived stream each, opened with the first placement.

Stream numbers are this gateway's, unique on a connection. When a connection is lost its requests hear it, once, and
the worker aborts them by itself; the next placement on that worker opens another connection. The connection of a
worker that stands still does not break: it is given up when neither a beat nor a token has come for a while.
docs/decisions/0013-tokens-travel-in-batches.md
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from shoal_contracts.errors import ShoalError, Unavailable, from_failure
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import decode_pb2, decode_pb2_grpc, fleet_pb2
from shoal_gateway.links.peers import spawn_if_open, usable
from shoal_gateway.links.wire import END_REASONS, split_tokens, to_error, to_generate_request
from shoal_gateway.ports import EndReason, TokenSink
from shoal_gateway.request import Placement, ServedModel, TokenBatch
from shoal_policy import DecodeWorkerView
from shoal_runtime.clock import Clock
from shoal_runtime.grpc import connect
from shoal_runtime.presence import QUIET_AFTER_S, Fleet, Member
from shoal_runtime.process import Process
from shoal_runtime.streams import DuplexStream, TurnWriter

CANCEL_BYTES = 4
RECENT_ENDS = 1024

_Item = decode_pb2.Place | int  # an int is a stream to cancel


class PlacedStream:
    """One offer and what becomes of it; see ``ports.PlacedRequest``."""

    def __init__(self, link: "_WorkerLink", stream_id: int, sink: TokenSink, length_tokens: int) -> None:
        self._link = link
        self._stream_id = stream_id
        self.sink = sink
        self.length_tokens = length_tokens
        self.placed_at_s = link.clock.monotonic()
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def instance_id(self) -> str:
        return self._link.instance_id

    async def accepted(self) -> None:
        await self.answer

    def cancel(self) -> None:
        self._link.cancel(self._stream_id)


class _WorkerLink:
    """One connection to one incarnation of a worker."""

    def __init__(
        self,
        member: Member,
        clock: Clock,
        on_ended: Callable[[], None],
        close_later: Callable[["_WorkerLink"], None],
    ) -> None:
        self.clock = clock
        self.instance_id = member.instance_id
        self.address = member.address
        self.incarnation = member.incarnation
        self._on_ended = on_ended
        self._close_later = close_later
        self._streams: dict[int, PlacedStream] = {}
        self._recent: deque[tuple[float, PlacedStream]] = deque(maxlen=RECENT_ENDS)  # when which ended
        self._numbers = itertools.count(1)
        self._heard_s = clock.monotonic()
        self._channel = connect(member.address)
        writer: TurnWriter[_Item] = TurnWriter(_build, weigh=_weigh)
        self._stream: DuplexStream[_Item, decode_pb2.ServeReply] = DuplexStream(
            decode_pb2_grpc.DecodeStub(self._channel).Serve,
            writer,
            on_reply=self._on_reply,
            on_lost=self._on_lost,
        )

    @property
    def is_open(self) -> bool:
        return self._stream.is_open

    @property
    def running_requests(self) -> int:
        return len(self._streams)

    def give_up_if_quiet(self) -> None:
        """Its worker does not beat any more."""
        if self.clock.monotonic() - self._heard_s >= QUIET_AFTER_S:
            self._stream.give_up(Unavailable(pb.PEER_SILENT, "a decode worker stands still; try again"))

    def place(self, placement: Placement, sink: TokenSink) -> PlacedStream:
        stream_id = next(self._numbers)
        placed = self._streams[stream_id] = PlacedStream(self, stream_id, sink, placement.length_tokens)
        self._stream.send(decode_pb2.Place(stream_id=stream_id, request=to_generate_request(placement)))
        return placed

    def cancel(self, stream_id: int) -> None:
        if self._end(stream_id) is not None:
            self._stream.send(stream_id)
            self._on_ended()

    def change_since(self, beat_at_s: float) -> tuple[int, int]:
        """Requests and tokens by which this gateway's own placements changed the load that a beat told."""
        begun = [placed for placed in self._streams.values() if placed.placed_at_s > beat_at_s]
        recent = takewhile(lambda end: end[0] > beat_at_s, reversed(self._recent))  # ends are in order of time
        ended = [placed for _, placed in recent if placed.placed_at_s <= beat_at_s]
        tokens = sum(placed.length_tokens for placed in begun) - sum(placed.length_tokens for placed in ended)
        return len(begun) - len(ended), tokens

    async def close(self) -> None:
        await self._stream.close()
        await self._channel.close()

    def _on_reply(self, reply: decode_pb2.ServeReply) -> None:
        self._heard_s = self.clock.monotonic()
        for accepted in reply.accepted:
            placed = self._streams.get(accepted.stream_id)
            if placed is not None and not placed.answer.done():
                placed.answer.set_result(None)
        for refused in reply.refused:
            self._refuse(refused.stream_id, from_failure(refused.failure))
        for started in reply.started:
            if (placed := self._streams.get(started.stream_id)) is not None:
                placed.sink.on_started(started.hit_tokens)
        logprobs = {entry.stream_id: tuple(t.SerializeToString() for t in entry.tokens) for entry in reply.logprobs}
        for stream_id, token_ids in split_tokens(reply.stream_ids, reply.counts, reply.token_ids):
            if (placed := self._streams.get(stream_id)) is not None:
                placed.sink.on_tokens(TokenBatch(token_ids, logprobs.get(stream_id, ())))
        for finished in reply.finished:
            self._finish(finished)

    def _end(self, stream_id: int) -> PlacedStream | None:
        placed = self._streams.pop(stream_id, None)
        if placed is not None:
            self._recent.append((self.clock.monotonic(), placed))
        return placed

    def _refuse(self, stream_id: int, error: ShoalError) -> None:
        placed = self._end(stream_id)
        if placed is not None and not placed.answer.done():
            placed.answer.set_exception(error)
            self._on_ended()

    def _finish(self, finished: decode_pb2.Finished) -> None:
        placed = self._end(finished.stream_id)
        if placed is None:
            return
        if not placed.answer.done():
            placed.answer.set_result(None)
        placed.sink.on_finished(END_REASONS.get(finished.reason, EndReason.CANCEL), to_error(finished))
        self._on_ended()

    def _on_lost(self, error: ShoalError) -> None:
        streams, self._streams = self._streams, {}
        for placed in streams.values():
            if placed.answer.done():
                placed.sink.on_lost(_as_unavailable(error))
            else:
                placed.answer.set_exception(_as_unavailable(error))
        self._close_later(self)
        self._on_ended()


class DecodeLinks:
    """See ``ports.DecodeFleet``."""

    def __init__(self, process: Process, fleet: Fleet) -> None:
        self._process = process
        self._fleet = fleet
        self._links: dict[str, _WorkerLink] = {}
        self._room = asyncio.Event()
        fleet.on_change(self._on_change)
        process.stack.push_async_callback(self.close)

    def models(self) -> list[ServedModel]:
        found: dict[tuple[str, str], ServedModel] = {}
        for member in usable(self._fleet, fleet_pb2.DECODE):
            if (told := member.model) is not None:
                model = ServedModel(told.name, told.pool, told.block_tokens, told.max_context_tokens)
                found.setdefault((told.name, told.pool), model)
        return list(found.values())

    def workers(self, pool: str) -> list[DecodeWorkerView]:
        members = usable(self._fleet, fleet_pb2.DECODE)
        return [self._view(member) for member in members if member.model is not None and member.model.pool == pool]

    def place(self, instance_id: str, placement: Placement, sink: TokenSink) -> PlacedStream:
        member = self._fleet.get(instance_id)
        if member is None:
            raise Unavailable(pb.UNAVAILABLE, "a decode worker is not there any more; try again")
        link = self._links.get(instance_id)
        if link is None or not link.is_open or link.incarnation != member.incarnation:
            if link is not None and link.is_open and not link.running_requests:
                self._close_later(link)
            link = _WorkerLink(member, self._process.clock, self._room.set, self._close_later)
            self._links[instance_id] = link
        return link.place(placement, sink)

    async def room(self, timeout_s: float) -> None:
        self._room.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._room.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        for link in list(self._links.values()):
            await link.close()
        self._links.clear()

    def _view(self, member: Member) -> DecodeWorkerView:
        load = member.load
        if load is None:
            return DecodeWorkerView(member.instance_id)
        running, cached = load.running_requests + load.waiting_requests, load.cached_tokens
        link = self._links.get(member.instance_id)
        if link is not None:
            requests, tokens = link.change_since(self._process.clock.monotonic() - member.age_s)
            # While presence is frozen the last beat grows old; what this gateway runs there is known all the same.
            running = max(running + requests, link.running_requests)
            cached = max(cached + tokens, 0)
        return DecodeWorkerView(
            instance_id=member.instance_id,
            running_requests=running,
            max_running_requests=load.max_running_requests or None,
            cached_tokens=cached,
            max_cached_tokens=load.max_cached_tokens or None,
        )

    def _on_change(self) -> None:
        self._room.set()
        for instance_id, link in list(self._links.items()):
            if self._fleet.get(instance_id) is not None:
                continue
            if link.running_requests:
                link.give_up_if_quiet()
            else:
                self._close_later(link)

    def _close_later(self, link: _WorkerLink) -> None:
        if self._links.get(link.instance_id) is link:
            del self._links[link.instance_id]
        spawn_if_open(self._process, link.close(), "decode_link_close")


def _build(items: Sequence[_Item]) -> Iterable[decode_pb2.ServeRequest]:
    """Cancels come after the places of the same turn: a request may be placed and cancelled in it."""
    places = [item for item in items if not isinstance(item, int)]
    cancels = [item for item in items if isinstance(item, int)]
    yield decode_pb2.ServeRequest(place=places, cancel=pack_u32(cancels))


def _weigh(item: _Item) -> int:
    return CANCEL_BYTES if isinstance(item, int) else item.ByteSize()


def _as_unavailable(error: ShoalError) -> ShoalError:
    """Whatever broke the connection: another worker may take the request."""
    if isinstance(error, Unavailable):
        return error
    return Unavailable(pb.UNAVAILABLE, "the connection to a decode worker broke; try again")
