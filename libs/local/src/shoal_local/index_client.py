"""Asks the instances of kvindex, wherever they are, on behalf of a person at a terminal.

They are found by their presence on NATS: whoever beats within a little more than one beat is asked, each with the same
deadline. An instance that does not answer is told as such and keeps nobody from hearing the others.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message
from nats.aio.msg import Msg

from shoal_contracts import subjects
from shoal_contracts.errors import ShoalError
from shoal_contracts.v1 import fleet_pb2, kvindex_pb2, kvindex_pb2_grpc
from shoal_local.nats_client import NatsAway, connected, shown_address
from shoal_runtime import grpc
from shoal_runtime.presence import BEAT_EACH_S

if TYPE_CHECKING:
    Stub: TypeAlias = kvindex_pb2_grpc.KvIndexAsyncStub

LISTEN_S = BEAT_EACH_S + 0.5
ANSWER_S = 5.0

Reply = TypeVar("Reply", bound=Message)


class IndexNotFound(Exception):
    """No instance of kvindex can be asked; the message tells what to look at."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of kvindex as it announced itself, with what it says against itself."""

    instance_id: str
    address: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Answer(Generic[Reply]):
    """What one instance said: ``reply``, or why there is none."""

    instance: Instance
    reply: Reply | None
    failure: ShoalError | None = None


async def overviews(nats_url: str) -> list[Answer[kvindex_pb2.OverviewReply]]:
    """What every instance says about the store. Raises IndexNotFound."""
    return await ask_overviews(await find(nats_url))


async def ask_overviews(instances: Sequence[Instance]) -> list[Answer[kvindex_pb2.OverviewReply]]:
    """What these instances say about the store."""

    def asked(stub: "Stub") -> Awaitable[kvindex_pb2.OverviewReply]:
        return grpc.call(stub.Overview, kvindex_pb2.OverviewRequest(), timeout_s=ANSWER_S)

    return await _ask_all(instances, asked)


async def explanations(nats_url: str, request_id: str) -> list[Answer[kvindex_pb2.ExplainReply]]:
    """What every instance remembers of a request. Raises IndexNotFound."""
    request = kvindex_pb2.ExplainRequest(request_id=request_id)

    def asked(stub: "Stub") -> Awaitable[kvindex_pb2.ExplainReply]:
        return grpc.call(stub.Explain, request, timeout_s=ANSWER_S)

    return await _ask_all(await find(nats_url), asked)


async def find(nats_url: str) -> list[Instance]:
    """The instances that beat now, by their ids. Raises IndexNotFound when there is none."""
    found: dict[str, Instance] = {}

    async def on_beat(message: Msg) -> None:
        try:
            beat = fleet_pb2.Beat.FromString(message.data)
        except DecodeError:
            return
        found[beat.instance_id] = Instance(beat.instance_id, beat.address, beat.reason)

    try:
        async with connected(nats_url) as connection:
            await connection.subscribe(subjects.beats(fleet_pb2.KVINDEX), cb=on_beat)
            await asyncio.sleep(LISTEN_S)
    except NatsAway as error:
        raise IndexNotFound(str(error)) from error
    if not found:
        raise IndexNotFound(f"No instance of kvindex is there: nothing was heard on NATS at {shown_address(nats_url)}.")
    return [found[instance_id] for instance_id in sorted(found)]


async def _ask_all(instances: Sequence[Instance], asked: Callable[["Stub"], Awaitable[Reply]]) -> list[Answer[Reply]]:
    return list(await asyncio.gather(*(_ask(instance, asked) for instance in instances)))


async def _ask(instance: Instance, asked: Callable[["Stub"], Awaitable[Reply]]) -> Answer[Reply]:
    async with grpc.connect(instance.address) as channel:
        try:
            return Answer(instance, await asked(kvindex_pb2_grpc.KvIndexStub(channel)))
        except ShoalError as failure:
            return Answer(instance, None, failure)


def plain(message: Message) -> dict[str, object]:
    """For ``json``: numbers as numbers, enums by name, what is unknown as None. Protobuf's own JSON writes large
    numbers as text and leaves out what is unknown."""
    return {field.name: _plain_field(message, field) for field in message.DESCRIPTOR.fields}


# The descriptors of the two implementations of protobuf share no type: Any.
def _plain_field(message: Message, field: Any) -> object:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_plain_value(field, one) for one in value]
    return _plain_value(field, value)


def _plain_value(field: Any, value: object) -> object:
    if isinstance(value, Message):
        return plain(value)
    if field.enum_type is not None and isinstance(value, int):
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value
