"""Who may be given work, by role, and the channels for unary calls to them."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable
from typing import Any

import grpc.aio

from shoal_contracts.errors import Refused, Unavailable
from shoal_runtime.grpc import connect
from shoal_runtime.presence import Fleet, Member, Role
from shoal_runtime.process import Process


def usable(fleet: Fleet, role: Role) -> list[Member]:
    """Live instances that are ready and stay."""
    return [member for member in fleet.live(role) if member.is_ready and not member.is_draining]


async def meet(fleet: Fleet, roles: Iterable[Role], wait_s: float) -> None:
    """Return when a ready instance of each role was heard, or after ``wait_s``: then some are really not there.

    Instances beat once a second. Until then a gateway that just started knows nobody, and would refuse what the fleet
    can serve.
    """

    async def heard(role: Role) -> None:
        with contextlib.suppress(Unavailable):
            await fleet.wait_for(role, timeout_s=wait_s)

    await asyncio.gather(*map(heard, roles))


def spawn_if_open(process: Process, work: Coroutine[Any, Any, None], name: str) -> bool:
    """Run ``work`` in the background; False while the process closes: then the exit stack ends every connection."""
    try:
        process.tasks.spawn(work, name=name)
    except Refused:
        work.close()
        return False
    return True


class Channels:
    """One channel a peer, apart from its long-lived stream: a large body must not delay anybody's tokens.

    The channel of a peer that left is closed ``grace_s`` later, which must be longer than any call: closing cancels
    those in flight. Until ``close`` nothing is cancelled.
    """

    def __init__(self, process: Process, fleet: Fleet, role: Role, grace_s: float) -> None:
        self._process = process
        self._fleet = fleet
        self._role = role
        self._grace_s = grace_s
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._leaving: set[grpc.aio.Channel] = set()
        fleet.on_change(self._on_change)

    def get(self, member: Member) -> grpc.aio.Channel:
        if member.address not in self._channels:
            self._channels[member.address] = connect(member.address)
        return self._channels[member.address]

    async def close(self) -> None:
        """Close every channel now."""
        channels = [*self._channels.values(), *self._leaving]
        self._channels.clear()
        self._leaving.clear()
        for channel in channels:
            await channel.close()

    def _on_change(self) -> None:
        there = {member.address for member in self._fleet.live(self._role)}
        for address in self._channels.keys() - there:
            channel = self._channels.pop(address)
            self._leaving.add(channel)
            spawn_if_open(self._process, self._close_later(channel), "channel_close")

    async def _close_later(self, channel: grpc.aio.Channel) -> None:
        await self._process.clock.sleep(self._grace_s)
        await channel.close()
        self._leaving.discard(channel)
