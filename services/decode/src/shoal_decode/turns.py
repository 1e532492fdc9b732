"""What waits for a gateway, and the one message that one turn of the loop makes of it.

A ``Slot`` is the sink of one stream: what its stream tells is merged until the writer takes it, so a message holds
at most one entry a stream however long the peer did not read. The bound on what waits is per slot: a stream that
is not read ends alone. Acceptances and refusals stand before tokens, ends after them.
docs/decisions/0013-tokens-travel-in-batches.md
"""

from array import array
from collections.abc import Callable, Iterable, Sequence

from shoal_contracts.errors import ShoalError, to_failure
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import decode_pb2
from shoal_decode import metrics, wire
from shoal_decode.token_stream import StreamEnd
from shoal_engine.api import Step, TokenLogprobs

_TOKEN_BYTES = 4
_LOGPROB_BYTES = 16
_ENTRY_BYTES = 64


class Slot:
    """One stream number of one connection. ``wake`` is called when something new waits and nothing did before."""

    __slots__ = (
        "_is_waiting",
        "_max_unread_tokens",
        "_wake",
        "end",
        "hit_tokens",
        "is_accepted",
        "logprobs",
        "refused",
        "stream_id",
        "token_ids",
    )

    def __init__(self, stream_id: int, max_unread_tokens: int, wake: Callable[["Slot"], None]) -> None:
        self.stream_id = stream_id
        self.is_accepted = False
        self.refused: ShoalError | None = None
        self.hit_tokens: int | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.end: StreamEnd | None = None
        self._max_unread_tokens = max_unread_tokens
        self._wake = wake
        self._is_waiting = False

    def accept(self) -> None:
        self.is_accepted = True
        self._touch()

    def refuse(self, error: ShoalError) -> None:
        self.refused = error
        self._touch()

    def step(self, step: Step) -> bool:
        """False when more than the bound waits unread."""
        if step.hit_tokens is not None:
            self.hit_tokens = step.hit_tokens
        self.token_ids.extend(step.token_ids)
        if step.logprobs is not None:
            self.logprobs.extend(step.logprobs)
        self._touch()
        return len(self.token_ids) <= self._max_unread_tokens

    def finished(self, end: StreamEnd) -> None:
        self.end = end
        self._touch()

    def weight_bytes(self) -> int:
        """About what this slot adds to a message."""
        tops = len(self.logprobs[0].top) if self.logprobs else 0
        return _ENTRY_BYTES + len(self.token_ids) * _TOKEN_BYTES + len(self.logprobs) * _LOGPROB_BYTES * (1 + tops)

    def taken(self) -> None:
        """Everything that waited is in a message now."""
        self.is_accepted, self.refused, self.hit_tokens, self.end = False, None, None, None
        if self.token_ids:
            self.token_ids = []
        if self.logprobs:
            self.logprobs = []
        self._is_waiting = False

    def _touch(self) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            self._wake(self)


def serve_replies(slots: Sequence[Slot]) -> Iterable[decode_pb2.ServeReply]:
    """One message with all that waits in ``slots``."""
    reply = decode_pb2.ServeReply()
    stream_ids, counts, token_ids = array("I"), array("I"), array("I")
    for slot in slots:
        if slot.token_ids:
            stream_ids.append(slot.stream_id)
            counts.append(len(slot.token_ids))
            token_ids.extend(slot.token_ids)
        if slot.is_accepted or slot.refused is not None or slot.hit_tokens is not None:
            _add_beginning(reply, slot)
        if slot.logprobs:
            reply.logprobs.add(stream_id=slot.stream_id, tokens=map(wire.logprobs, slot.logprobs))
        if slot.end is not None:
            reply.finished.append(wire.finished(slot.stream_id, slot.end))
        slot.taken()
    reply.stream_ids, reply.counts, reply.token_ids = map(pack_u32, (stream_ids, counts, token_ids))
    metrics.TOKENS.inc(len(token_ids))
    metrics.REPLIES.inc()
    return [reply]


def _add_beginning(reply: decode_pb2.ServeReply, slot: Slot) -> None:
    if slot.is_accepted:
        reply.accepted.add(stream_id=slot.stream_id)
    if slot.refused is not None:
        reply.refused.add(stream_id=slot.stream_id, failure=to_failure(slot.refused))
    if slot.hit_tokens is not None:
        reply.started.add(stream_id=slot.stream_id, hit_tokens=slot.hit_tokens)


def generate_reply(slot: Slot) -> decode_pb2.GenerateReply:
    """The message of a stream that has a call of its own."""
    reply = decode_pb2.GenerateReply(token_ids=pack_u32(slot.token_ids), logprobs=map(wire.logprobs, slot.logprobs))
    if slot.hit_tokens is not None:
        reply.started.hit_tokens = slot.hit_tokens
    if slot.end is not None:
        reply.finished.CopyFrom(wire.finished(slot.stream_id, slot.end))
    metrics.TOKENS.inc(len(slot.token_ids))
    metrics.REPLIES.inc()
    slot.taken()
    return reply
