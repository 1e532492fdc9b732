"""The log on JetStream: one stream in memory, bounded by bytes and age, its oldest changes go first.

Appending is pipelined and keeps the order of the calls: messages of one connection arrive in the order in which they
were written. Following is a pull consumer without acknowledgements: a few changes are asked for at a time, because
what lies unread in the connection holds up everything behind it, the answers to pings too. The server tells that it
is alive (heartbeats) and numbers what it sends, so a missing number ends the following. A restarted NATS has
forgotten stream and consumer; both are made again by whoever opens. docs/decisions/0008-kvindex-scales.md
"""

import asyncio
import json
from collections.abc import Callable
from datetime import datetime
from typing import TypeAlias

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext, api

from shoal_contracts import subjects
from shoal_contracts.errors import Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_kvindex.ingest.changes import Change
from shoal_kvindex.ingest.shared_log import Logged, Opened
from shoal_kvindex.wire import from_bytes, to_bytes
from shoal_runtime.clock import Clock
from shoal_runtime.logs import get_logger
from shoal_runtime.nats import NatsConnection

log = get_logger(__name__)

STREAM_BYTES = 64 << 20  # about a million and a half objects: to apply them takes seconds
STREAM_AGE_S = 600.0
DUPLICATE_WINDOW_S = 60.0
REQUEST_S = 2.0
HEARTBEAT_S = 1.0
SILENCE_S = 3.0
WATCH_EACH_S = 0.25
ASKED_AT_ONCE = 16  # changes
ASKED_FOR_S = 10.0
INACTIVE_S = 30.0  # then the server forgets the consumer of an instance that is gone
NEXT = f"{api.DEFAULT_PREFIX}.CONSUMER.MSG.NEXT.{subjects.INDEX_STREAM}."

Hear: TypeAlias = Callable[[Logged], None]
Lost: TypeAlias = Callable[[str], None]

_IN_USE_ERROR = 10058  # the stream exists with another configuration


class NatsLog:
    """Implements ``LogLink``; on one event loop. ``watch`` is a task of the process."""

    def __init__(self, connection: NatsConnection, publisher_id: str, clock: Clock) -> None:
        self._nats = connection
        self._publisher_id = publisher_id
        self._clock = clock
        self._jetstream: JetStreamContext = connection.jetstream  # one: its pending acknowledgements are its own
        self._sending = asyncio.Lock()
        self._following: _Following | None = None
        self._last_seq = 0
        self._last_at: datetime | None = None
        connection.on_reconnect(self._on_reconnect)

    async def open(self) -> Opened:
        stream = api.StreamConfig(
            name=subjects.INDEX_STREAM,
            subjects=[subjects.INDEX_CHANGE],
            retention=api.RetentionPolicy.LIMITS,
            storage=api.StorageType.MEMORY,
            discard=api.DiscardPolicy.OLD,
            max_bytes=STREAM_BYTES,
            max_age=STREAM_AGE_S,
            duplicate_window=DUPLICATE_WINDOW_S,
        )
        if not self._nats.is_connected:
            raise _away()
        try:
            async with asyncio.timeout(REQUEST_S):
                found = await self._add_stream(stream)
                last = await self._last_message(found.state.last_seq) if found.state.messages else None
        except (TimeoutError, nats.errors.Error) as error:
            raise _away() from error
        self._last_seq, self._last_at = found.state.last_seq, last
        first_seq = found.state.first_seq if found.state.messages else found.state.last_seq + 1
        return Opened(str(found.created), first_seq, found.state.last_seq)

    async def _add_stream(self, stream: api.StreamConfig) -> api.StreamInfo:
        try:
            await self._jetstream.add_stream(stream)
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _IN_USE_ERROR:
                raise
            await self._jetstream.update_stream(stream)
        return await self._jetstream.stream_info(subjects.INDEX_STREAM)

    async def _last_message(self, seq: int) -> datetime | None:
        message = await self._jetstream.get_msg(subjects.INDEX_STREAM, seq)
        return message.time

    async def append(self, change_id: str, change: Change) -> None:
        payload = to_bytes(self._publisher_id, change)
        if not self._nats.is_connected:
            raise _away()
        try:
            async with self._sending:  # first asked, first written
                acknowledged = await self._jetstream.publish_async(
                    subjects.INDEX_CHANGE, payload, stream=subjects.INDEX_STREAM, headers={"Nats-Msg-Id": change_id}
                )
            await acknowledged
        except nats.errors.Error as error:
            raise _away() from error

    async def follow(self, after_seq: int, hear: Hear, lost: Lost) -> None:
        await self.close()
        following = _Following(self._nats.client, self._clock, hear, lost, (self._last_seq, self._last_at))
        self._following = following
        try:
            async with asyncio.timeout(REQUEST_S):
                await following.begin(self._jetstream, after_seq)
        except (TimeoutError, nats.errors.Error) as error:
            await self.close()
            raise _away() from error

    async def watch(self) -> None:
        """Notice that the log went away when nobody publishes."""
        while True:
            await self._clock.sleep(WATCH_EACH_S)
            if self._following is not None:
                await self._following.check()

    async def _on_reconnect(self) -> None:
        if self._following is not None:
            await self._following.end("NATS was away")

    async def close(self) -> None:
        """Follow no more."""
        following, self._following = self._following, None
        if following is not None:
            await following.end()


class _Following:
    """One consumer, from its making to the first trouble."""

    def __init__(self, client: Client, clock: Clock, hear: Hear, lost: Lost, old_until: tuple[int, datetime | None]):
        """``old_until``: the last change when the log was opened, and when it came in."""
        self._client = client
        self._clock = clock
        self._hear = hear
        self._lost = lost
        self._old_seq, self._old_at = old_until
        self._subscription: Subscription | None = None
        self._inbox = client.new_inbox()
        self._next = ""
        self._consumer_seq = 0
        self._left = 0  # of what was asked for
        self._heard_at_s = clock.monotonic()
        self._is_over = False

    async def begin(self, jetstream: JetStreamContext, after_seq: int) -> None:
        # Without bounds of its own: no more comes than was asked for.
        self._subscription = await self._client.subscribe(
            self._inbox, cb=self._on_message, pending_msgs_limit=0, pending_bytes_limit=0
        )
        consumer = api.ConsumerConfig(
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=after_seq + 1,
            ack_policy=api.AckPolicy.NONE,
            inactive_threshold=INACTIVE_S,
            mem_storage=True,
            num_replicas=1,
        )
        self._next = NEXT + (await jetstream.add_consumer(subjects.INDEX_STREAM, consumer)).name
        await self._ask()

    async def end(self, reason: str = "") -> None:
        """Hear nothing more; with a reason, say so."""
        if self._is_over:
            return
        self._is_over = True
        if reason:
            self._lost(reason)
        if self._subscription is not None:
            try:
                await self._subscription.unsubscribe()
            except nats.errors.Error as error:  # the connection is gone, and the subscription with it
                log.debug("log.unsubscribe_failed", error=type(error).__name__)

    async def check(self) -> None:
        """End when the server is away or silent."""
        if not self._client.is_connected:
            await self.end("NATS is away")
        elif self._clock.monotonic() - self._heard_at_s > SILENCE_S:
            await self.end("the log is silent")

    async def _ask(self) -> None:
        self._left = ASKED_AT_ONCE
        question = {"batch": ASKED_AT_ONCE, "expires": int(ASKED_FOR_S * 1e9), "idle_heartbeat": int(HEARTBEAT_S * 1e9)}
        await self._client.publish(self._next, json.dumps(question).encode(), reply=self._inbox)

    async def _on_message(self, message: Msg) -> None:
        if self._is_over:
            return
        self._heard_at_s = self._clock.monotonic()
        status = (message.headers or {}).get(api.Header.STATUS)
        try:
            if status is None:
                await self._on_change(message)
            elif status == api.StatusCode.REQUEST_TIMEOUT:
                await self._ask()
            elif status != api.StatusCode.CONTROL_MESSAGE:  # which are heartbeats
                await self.end(f"the log answered {status}")
        except nats.errors.Error as error:
            await self.end(f"the log cannot be asked ({type(error).__name__})")

    async def _on_change(self, message: Msg) -> None:
        about = message.metadata
        if about.sequence.consumer != self._consumer_seq + 1:
            await self.end("a change was lost on the way")
            return
        self._consumer_seq = about.sequence.consumer
        age_s = 0.0
        if about.sequence.stream <= self._old_seq and self._old_at is not None:
            # Two times of the same server; our own clock may be another one.
            age_s = max(0.0, (self._old_at - about.timestamp).total_seconds())
        change_id = (message.headers or {}).get(api.Header.MSG_ID, "")
        self._hear(Logged(change_id, about.sequence.stream, age_s, lambda: _read(message.data)))
        self._left -= 1
        if not self._left and not self._is_over:
            await self._ask()
        await asyncio.sleep(0)  # the loop has requests to answer


def _read(payload: bytes) -> Change | None:
    try:
        return from_bytes(payload)
    except ValueError as error:
        log.warning("log.change_dropped", reason=str(error))
        return None


def _away() -> Unavailable:
    return Unavailable(pb.UNAVAILABLE, "the log of the index is away", retry_after_s=1)
