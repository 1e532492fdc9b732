"""Presence: each instance says once a second that it is there; watchers judge silence by their own clock.

``Announcer`` beats. ``Fleet`` keeps the last beat of each instance and when it came, on a clock of its own that
stands still while this process is cut off from NATS or does not run: a watcher that hears nobody knows nothing.
That clock only advances with a proven round trip, and by at most ``MAX_STEP_S`` each. Three seconds of silence: no
new work. A beat of an incarnation older than one already seen is fenced and counted.
docs/decisions/0016-deadlines-and-typed-failures.md
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from shoal_contracts import subjects
from shoal_contracts.errors import Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import fleet_pb2
from shoal_runtime.logs import get_logger
from shoal_runtime.metrics import BEATS_FENCED
from shoal_runtime.nats import Bus
from shoal_runtime.version import version

if TYPE_CHECKING:
    from shoal_runtime.process import Process

log = get_logger(__name__)

BEAT_EACH_S = 1.0
SILENT_AFTER_S = 3.0
PROVE_EACH_S = 0.25
MAX_STEP_S = 1.0
QUIET_AFTER_S = 1.0  # a connection of an instance that fell silent, without a message: nothing of it runs any more
FORGET_AFTER_S = 600.0  # how long the incarnation of a silent instance is remembered

Role: TypeAlias = fleet_pb2.Role.ValueType


@dataclass(frozen=True, slots=True)
class ServedGroup:
    """One object group of the store for this pool: full attention when ``window_tokens`` is None."""

    object_group_id: int
    window_tokens: int | None = None
    is_replayable: bool = False  # the engine can rebuild a missing window


@dataclass(frozen=True, slots=True)
class Served:
    """The model an instance serves."""

    name: str
    pool: str = ""
    block_tokens: int = 0
    max_context_tokens: int = 0
    tiers: tuple[str, ...] = ()
    groups: tuple[ServedGroup, ...] = ()  # empty: unknown


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker is busy with; its absence means unknown, not idle."""

    running_requests: int
    max_running_requests: int
    cached_tokens: int
    max_cached_tokens: int
    waiting_requests: int


@dataclass(frozen=True, slots=True)
class Presence:
    """What an instance says about itself; identity and readiness are added by the announcer."""

    address: str = ""
    model: Served | None = None
    load: Load | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """One instance as last heard. ``age_s`` is the silence since, by the watcher's clock."""

    instance_id: str
    incarnation: int
    role: Role
    address: str
    is_ready: bool
    is_draining: bool
    reason: str
    model: Served | None
    load: Load | None
    age_s: float = 0.0


class Announcer:
    """Beats for one instance until the process closes; ``describe`` is asked each time and must not block."""

    def __init__(self, process: "Process", nats: Bus, role: Role, describe: Callable[[], Presence]) -> None:
        self._process = process
        self._nats = nats
        self._role = role
        self._describe = describe
        self._subject = subjects.beat(role, process.instance_id)

    async def start(self) -> None:
        """Beat now and each second from now on."""
        await self.beat()
        self._process.tasks.spawn(self._run, name="announcer", restart=True)

    async def _run(self) -> None:
        while True:
            # A change of readiness is told at once: it decides whether others send work here.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_EACH_S):
                    await self._process.health.next_change()
            await self.beat()

    async def beat(self) -> None:
        """Say it now; silence is the right answer while NATS is away."""
        process, presence = self._process, self._describe()
        message = fleet_pb2.Beat(
            instance_id=process.instance_id,
            incarnation=process.incarnation,
            role=self._role,
            address=presence.address,
            is_ready=process.health.is_ready,
            is_draining=process.is_draining,
            reason=process.health.reason,
            version=version(),
            sent_at_unix_ms=int(process.clock.now() * 1000),
        )
        if (model := presence.model) is not None:
            message.model.name = model.name
            message.model.pool = model.pool
            message.model.block_tokens = model.block_tokens
            message.model.max_context_tokens = model.max_context_tokens
            message.model.tiers.extend(model.tiers)
            message.model.groups.extend(_group_to_wire(group) for group in model.groups)
        if (load := presence.load) is not None:
            message.load.running_requests = load.running_requests
            message.load.max_running_requests = load.max_running_requests
            message.load.cached_tokens = load.cached_tokens
            message.load.max_cached_tokens = load.max_cached_tokens
            message.load.waiting_requests = load.waiting_requests
        with contextlib.suppress(Unavailable):
            await self._nats.publish(self._subject, message)


@dataclass(slots=True)
class _Seen:
    member: Member
    at_s: float  # on the watch clock
    is_silent: bool = False


class Fleet:
    """What one process knows of the others. Listeners run on the loop after each change and must not block."""

    def __init__(self, process: "Process", nats: Bus, roles: Iterable[Role]) -> None:
        self._process = process
        self._nats = nats
        self._roles = tuple(roles)
        self._seen: dict[str, _Seen] = {}
        self._listeners: list[Callable[[], None]] = []
        self._changed = asyncio.Event()
        self._watch_s = 0.0
        self._proven_s = process.clock.monotonic()

    async def start(self) -> None:
        """Listen from now on. Members are known after their next beat: use ``wait_for``."""
        for role in self._roles:
            await self._nats.subscribe(subjects.beats(role), fleet_pb2.Beat, self._on_beat)
        self._process.tasks.spawn(self._run, name="fleet", restart=True)

    def live(self, role: Role) -> list[Member]:
        """Instances of ``role`` heard within ``SILENT_AFTER_S``, whether ready or not, by instance_id."""
        found = []
        for seen in self._seen.values():
            age_s = max(0.0, self._watch_s - seen.at_s)
            if seen.member.role == role and age_s <= SILENT_AFTER_S:
                found.append(replace(seen.member, age_s=age_s))
        return sorted(found, key=lambda member: member.instance_id)

    def get(self, instance_id: str) -> Member | None:
        """One live instance."""
        seen = self._seen.get(instance_id)
        if seen is None or self._watch_s - seen.at_s > SILENT_AFTER_S:
            return None
        return replace(seen.member, age_s=max(0.0, self._watch_s - seen.at_s))

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when a member came, changed (load included) or fell silent."""
        self._listeners.append(listener)

    async def wait_for(self, role: Role, *, timeout_s: float) -> Member:
        """The first ready member of ``role``. Unavailable when none is there in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._first_ready(role)
        except TimeoutError:
            name = fleet_pb2.Role.Name(role).lower()
            raise Unavailable(pb.UNAVAILABLE, f"no {name} instance is ready", retry_after_s=1) from None

    async def _first_ready(self, role: Role) -> Member:
        while True:
            for member in self.live(role):
                if member.is_ready and not member.is_draining:
                    return member
            self._changed.clear()
            await self._changed.wait()

    def _on_beat(self, beat: fleet_pb2.Beat) -> None:
        known = self._seen.get(beat.instance_id)
        if known is not None and beat.incarnation < known.member.incarnation:
            BEATS_FENCED.inc()
            return
        member = to_member(beat)
        self._seen[beat.instance_id] = _Seen(member, self._watch_s)
        if known is None or known.is_silent or known.member != member:
            self._tell()

    async def _run(self) -> None:
        while True:
            await self._process.clock.sleep(PROVE_EACH_S)
            if await self._nats.prove():
                self.advance()

    def advance(self) -> None:
        """The link was proven just now: silence up to this moment counts."""
        now_s = self._process.clock.monotonic()
        self._watch_s += min(now_s - self._proven_s, MAX_STEP_S)
        self._proven_s = now_s
        is_changed = False
        for instance_id, seen in list(self._seen.items()):
            age_s = self._watch_s - seen.at_s
            if age_s > FORGET_AFTER_S:
                del self._seen[instance_id]
            elif age_s > SILENT_AFTER_S and not seen.is_silent:
                seen.is_silent = is_changed = True
                log.warning("member.silent", member=instance_id, role=fleet_pb2.Role.Name(seen.member.role))
        if is_changed:
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        for listener in self._listeners:
            listener()


def to_member(beat: fleet_pb2.Beat) -> Member:
    """What one beat says."""
    model = load = None
    if beat.HasField("model"):
        served = beat.model
        model = Served(
            served.name,
            served.pool,
            served.block_tokens,
            served.max_context_tokens,
            tuple(served.tiers),
            tuple(_to_group(group) for group in served.groups),
        )
    if beat.HasField("load"):
        told = beat.load
        load = Load(
            told.running_requests,
            told.max_running_requests,
            told.cached_tokens,
            told.max_cached_tokens,
            told.waiting_requests,
        )
    return Member(
        beat.instance_id,
        beat.incarnation,
        beat.role,
        beat.address,
        beat.is_ready,
        beat.is_draining,
        beat.reason,
        model,
        load,
    )


def _group_to_wire(group: ServedGroup) -> fleet_pb2.StateGroup:
    is_full = group.window_tokens is None
    return fleet_pb2.StateGroup(
        object_group_id=group.object_group_id,
        kind=fleet_pb2.StateGroup.FULL if is_full else fleet_pb2.StateGroup.SLIDING_WINDOW,
        window_tokens=group.window_tokens or 0,
        is_replayable=group.is_replayable,
    )


def _to_group(group: fleet_pb2.StateGroup) -> ServedGroup:
    is_full = group.kind == fleet_pb2.StateGroup.FULL
    return ServedGroup(group.object_group_id, None if is_full else group.window_tokens, group.is_replayable)
