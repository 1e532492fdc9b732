"""One connection to NATS: publish and subscribe protobuf messages, come back after every outage.

The connection reconnects for ever; while it is away ``publish`` fails at once with a typed error instead of filling
a buffer, and the health part "nats" is degraded. After a reconnect the hooks run, in the order they were added,
because a restarted NATS has forgotten every memory stream. ``prove`` makes a round trip: presence trusts silence
only as far as the link was proven. docs/decisions/0003-prefill-is-pulled.md
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

import nats.errors
from google.protobuf.message import DecodeError, Message
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from shoal_contracts.errors import BadRequest, ShoalError, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_runtime import tracing
from shoal_runtime.logs import get_logger
from shoal_runtime.metrics import NATS_DISCONNECTS

if TYPE_CHECKING:
    from shoal_runtime.process import Process

log = get_logger(__name__)

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
START_S = 30.0
CONNECT_S = 2.0
RECONNECT_PAUSE_S = 0.25
PING_S = 1.0
MAX_SILENT_PINGS = 2
PROVE_S = 1.0
HOOK_PAUSE_S = 0.5
CLOSE_S = 3.0

Payload = TypeVar("Payload", bound=Message)


class Bus(Protocol):
    """What presence needs of a connection; ``testkit`` has one in memory."""

    @property
    def is_connected(self) -> bool: ...

    async def publish(self, subject: str, message: Message) -> None: ...

    async def subscribe(
        self, subject: str, message_type: type[Payload], handler: Callable[[Payload], Awaitable[None] | None]
    ) -> Subscription: ...

    async def prove(self) -> bool: ...


class NatsConnection:
    """Made by ``connect``; used on one event loop; closed by the process's exit stack."""

    def __init__(self, process: "Process", url: str) -> None:
        self._process = process
        self._url = url
        self._client = Client()
        self._hooks: list[Callable[[], Awaitable[None]]] = []
        self._reconnected = asyncio.Event()
        self._is_closing = False
        self._echo_subject = self._client.new_inbox()
        self._echo: asyncio.Future[None] | None = None

    @property
    def is_connected(self) -> bool:
        return bool(self._client.is_connected)

    @property
    def client(self) -> Client:
        """The client itself, for those who follow a stream."""
        return self._client

    @property
    def jetstream(self) -> JetStreamContext:
        """The client's JetStream side, for ``queues``."""
        return self._client.jetstream()

    def on_reconnect(self, hook: Callable[[], Awaitable[None]]) -> None:
        """Run ``hook`` after each reconnect; while any of the hooks fails, all of them are run again."""
        self._hooks.append(hook)

    async def open(self) -> None:
        """Connect, or raise Unavailable after ``START_S``."""
        try:
            async with asyncio.timeout(START_S):
                await self._client.connect(
                    self._url,
                    name=self._process.instance_id,
                    connect_timeout=int(CONNECT_S),
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RECONNECT_PAUSE_S,  # type: ignore[arg-type]  # a float works, the stub says int
                    ping_interval=int(PING_S),
                    max_outstanding_pings=MAX_SILENT_PINGS,
                    flush_timeout=CONNECT_S,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            await self.close()
            raise Unavailable(pb.UNAVAILABLE, f"NATS does not answer at {self._url}") from error
        if self._client.max_payload < MAX_PAYLOAD_BYTES:
            await self.close()
            raise Unavailable(pb.UNAVAILABLE, f"NATS must allow max_payload {MAX_PAYLOAD_BYTES}; see nats.conf")
        await self._client.subscribe(self._echo_subject, cb=self._on_echo)
        self._process.tasks.spawn(self._run_hooks, name="nats_hooks", restart=True)

    async def close(self) -> None:
        self._is_closing = True
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._client.close()  # writes what is still buffered
        except (OSError, TimeoutError, nats.errors.Error) as error:
            log.warning("nats.close_failed", error=type(error).__name__)

    async def publish(self, subject: str, message: Message, *, headers: Mapping[str, str] | None = None) -> None:
        """Send on core NATS. Unavailable while cut off; REQUEST_TOO_LARGE over the limit."""
        payload = self.encode(message)
        try:
            await self._client.publish(subject, payload, headers=self.headers(headers))
        except nats.errors.Error as error:
            raise cut_off() from error

    async def subscribe(
        self,
        subject: str,
        message_type: type[Payload],
        handler: Callable[[Payload], Awaitable[None] | None],
    ) -> Subscription:
        """Call ``handler`` for each message in order, under the sender's trace. Survives reconnects.

        A message that does not parse is dropped and logged; an exception of the handler is logged.
        """

        async def on_message(message: Msg) -> None:
            try:
                parsed = message_type.FromString(message.data)
            except DecodeError:
                log.warning("nats.message_dropped", subject=message.subject, reason="does not parse")
                return
            try:
                with tracing.start_span(subject, tracing.extract(message.headers or {})):
                    result = handler(parsed)
                    if result is not None:
                        await result
            except Exception as error:  # the boundary of one message: the next one is served all the same
                log.error("nats.handler_crashed", subject=message.subject, exc_info=error)

        try:
            return await self._client.subscribe(subject, cb=on_message)
        except nats.errors.Error as error:
            raise cut_off() from error

    async def prove(self) -> bool:
        """Whether a message makes it to the server and back now; answers within ``PROVE_S``.

        An echo of our own and not the client's flush: a flush that is cancelled or late leaves a PONG behind that
        breaks the connection when it comes. Not to be called twice at once.
        """
        if not self.is_connected:
            return False  # the client would buffer it, and trip over it when it is closed meanwhile
        self._echo = asyncio.get_running_loop().create_future()
        try:
            await self._client.publish(self._echo_subject)
            async with asyncio.timeout(PROVE_S):
                await self._echo
        except (TimeoutError, nats.errors.Error):
            return False
        return True

    async def _on_echo(self, _: Msg) -> None:
        if self._echo is not None and not self._echo.done():
            self._echo.set_result(None)

    def encode(self, message: Message) -> bytes:
        """The payload of ``message``, checked against connection and limit."""
        if not self.is_connected:
            raise cut_off()
        payload: bytes = message.SerializeToString()
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise BadRequest(pb.REQUEST_TOO_LARGE, f"the request is over the limit of {MAX_PAYLOAD_BYTES} bytes")
        return payload

    def headers(self, extra: Mapping[str, str] | None = None) -> dict[str, str] | None:
        """``extra`` plus the current trace; None when there is nothing to say."""
        carrier = dict(extra or {})
        tracing.inject(carrier)
        return carrier or None

    async def _on_error(self, error: Exception) -> None:
        # Failed reconnect attempts come here four times a second; the degraded health part tells of them once.
        if isinstance(error, nats.errors.SlowConsumerError):
            log.warning("nats.messages_dropped", subject=error.subject)
        else:
            log.debug("nats.error", error=type(error).__name__)

    async def _on_disconnected(self) -> None:
        if self._is_closing:
            return
        NATS_DISCONNECTS.inc()
        self._process.health.degrade("nats", "cut off from NATS; reconnecting")

    async def _on_reconnected(self) -> None:
        self._reconnected.set()

    async def _run_hooks(self) -> None:
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            is_done = False
            try:
                for hook in self._hooks:
                    await hook()
                is_done = True
            except ShoalError as error:  # also Refused: a server without room for a stream may have it soon
                log.warning("nats.hook_failed", error=error.message)
                await self._process.clock.sleep(HOOK_PAUSE_S)
            finally:
                if not is_done:
                    self._reconnected.set()  # also after a crash: this task is then started again
            if is_done and self.is_connected:
                self._process.health.set("nats", None)


def cut_off() -> Unavailable:
    """NATS cannot be used now."""
    return Unavailable(pb.UNAVAILABLE, "the message bus is away; try again", retry_after_s=1)


async def connect(process: "Process", url: str) -> NatsConnection:
    """An open connection, closed by ``process.stack``. Raises Unavailable when NATS does not answer in 30 s."""
    connection = NatsConnection(process, url)
    await connection.open()
    process.stack.push_async_callback(connection.close)
    return connection
