"""What can be known of a running system from outside: who beats, what waits in the queues, what the index has.

All of it goes through NATS and the instances' own answers, so it is the same for any system, wherever it runs. The
wall clock is used where a person wants to know an age; nothing is decided by it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import nats.errors
from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api

from shoal_contracts import subjects
from shoal_contracts.v1 import fleet_pb2
from shoal_contracts.v1 import kvindex_pb2 as index
from shoal_local.index_client import Answer, Instance, ask_overviews
from shoal_local.nats_client import connected
from shoal_runtime.presence import BEAT_EACH_S, SILENT_AFTER_S, Load, Served, to_member
from shoal_runtime.queues import CONSUMER

LISTEN_S = BEAT_EACH_S + 0.5
QUEUE_ANSWER_S = 2.0
FORGET_AFTER_S = 60.0  # how long an instance that fell silent is shown as such
KVINDEX = "kvindex"


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance as it last told of itself."""

    service: str
    instance_id: str
    address: str
    is_ready: bool
    is_draining: bool
    reason: str  # against it; "" when there is none
    started_at_s: float  # Unix time, by its own clock
    version: str  # "" when it tells none
    clock_ahead_s: float | None  # of its wall clock before ours, the way of the beat included
    model: Served | None
    load: Load | None
    silent_s: float = 0.0  # since its last beat, by our clock

    @property
    def is_silent(self) -> bool:
        """Others give it no new work."""
        return self.silent_s > SILENT_AFTER_S


@dataclass(frozen=True, slots=True)
class QueueView:
    """The prefill queue of one pool and tier."""

    pool: str
    tier: str
    queued_jobs: int  # not yet taken
    running_jobs: int  # taken and not settled
    idle_pulls: int  # workers that wait for a job at this moment
    has_consumer: bool  # without it nobody can take a job


@dataclass(frozen=True, slots=True)
class FleetView:
    """A system at one moment. Sequences are ordered, so that a page that is drawn again does not jump."""

    instances: tuple[InstanceView, ...]
    queues: tuple[QueueView, ...] | None  # None: JetStream does not answer
    overviews: tuple[Answer[index.OverviewReply], ...]  # one an instance of kvindex

    def of(self, service: str) -> list[InstanceView]:
        """The instances of one service."""
        return [instance for instance in self.instances if instance.service == service]


async def look(nats_url: str, *, wait_s: float = LISTEN_S) -> FleetView:
    """Listen to beats for ``wait_s``, then ask. Raises NatsAway; of parts that do not answer the view says so."""
    async with watching(nats_url) as watch:
        await asyncio.sleep(wait_s)
        return await watch.view()


@asynccontextmanager
async def watching(nats_url: str) -> AsyncIterator["FleetWatch"]:
    """For looking again and again over one connection. Raises NatsAway."""
    async with connected(nats_url) as client:
        watch = FleetWatch(client)
        await client.subscribe(subjects.BEATS, cb=watch.on_beat)
        yield watch


class FleetWatch:
    """Keeps the last beat of each instance; lives inside ``watching``."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._beats: dict[str, tuple[fleet_pb2.Beat, float, float]] = {}  # with our monotonic and wall clock

    async def on_beat(self, message: Msg) -> None:
        """A beat of an incarnation older than one already heard is fenced, as the services do."""
        try:
            beat = fleet_pb2.Beat.FromString(message.data)
        except DecodeError:
            return
        known = self._beats.get(beat.instance_id)
        if known is None or beat.incarnation >= known[0].incarnation:
            self._beats[beat.instance_id] = (beat, time.monotonic(), time.time())

    async def view(self) -> FleetView:
        """What is known now. Raises NatsAway when the connection is gone."""
        instances = self.instances()
        asked = [
            Instance(instance.instance_id, instance.address, instance.reason)
            for instance in instances
            if instance.service == KVINDEX and not instance.is_silent
        ]
        queues, overviews = await asyncio.gather(_queues(self._client), ask_overviews(asked))
        return FleetView(tuple(instances), queues, tuple(overviews))

    def instances(self, *, later_s: float = 0.0) -> list[InstanceView]:
        """Who was heard, as it will stand ``later_s`` from now if nobody says anything."""
        now_s = time.monotonic() + later_s
        for instance_id, (_, heard_s, _) in list(self._beats.items()):
            if now_s - heard_s > FORGET_AFTER_S:
                del self._beats[instance_id]
        views = [
            instance_view(beat, heard_at_unix_s=unix_s, silent_s=now_s - heard_s)
            for beat, heard_s, unix_s in self._beats.values()
        ]
        order = list(fleet_pb2.Role.keys())
        return sorted(views, key=lambda view: (order.index(view.service.upper()), view.instance_id))


def instance_view(beat: fleet_pb2.Beat, *, heard_at_unix_s: float, silent_s: float) -> InstanceView:
    """One beat as it is shown."""
    member = to_member(beat)
    return InstanceView(
        service=_service(beat.role),
        instance_id=beat.instance_id,
        address=beat.address,
        is_ready=beat.is_ready,
        is_draining=beat.is_draining,
        reason=beat.reason,
        started_at_s=beat.incarnation / 1000,
        version=beat.version,
        clock_ahead_s=beat.sent_at_unix_ms / 1000 - heard_at_unix_s if beat.sent_at_unix_ms else None,
        model=member.model,
        load=member.load,
        silent_s=silent_s,
    )


def _service(role: fleet_pb2.Role.ValueType) -> str:
    known = fleet_pb2.Role.DESCRIPTOR.values_by_number.get(role)
    return (fleet_pb2.Role.Name(fleet_pb2.ROLE_UNSPECIFIED) if known is None else known.name).lower()


async def _queues(client: Client) -> tuple[QueueView, ...] | None:
    """Every prefill queue that NATS has; None when its JetStream does not answer."""
    stream = client.jetstream(timeout=QUEUE_ANSWER_S)
    try:
        found = [await _queue(stream, told) for told in await _streams(stream)]
    except nats.errors.ConnectionClosedError:
        raise
    except (TimeoutError, nats.errors.Error):
        return None
    return tuple(sorted((queue for queue in found if queue is not None), key=lambda queue: (queue.pool, queue.tier)))


async def _streams(stream: JetStreamContext) -> Sequence[api.StreamInfo]:
    found: list[api.StreamInfo] = []
    while page := await stream.streams_info(offset=len(found)):
        found += page
    return found


async def _queue(stream: JetStreamContext, told: api.StreamInfo) -> QueueView | None:
    """None: it is no prefill queue."""
    names = [subjects.pool_and_tier(subject) for subject in told.config.subjects or ()]
    if len(names) != 1 or names[0] is None or told.config.name is None:
        return None
    pool, tier = names[0]
    try:
        consumer = await stream.consumer_info(told.config.name, CONSUMER)
    except nats.js.errors.NotFoundError:
        return QueueView(pool, tier, told.state.messages, 0, 0, has_consumer=False)
    running = consumer.num_ack_pending or 0
    return QueueView(pool, tier, consumer.num_pending or 0, running, consumer.num_waiting or 0, has_consumer=True)
