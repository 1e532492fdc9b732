"""The HTTP edge that ``lmcache server`` processes speak to: register, beat, leave, report.

Their protocol, not ours (``chunk`` is their word for a block). What matters of it: a server whose beat is answered
404 registers again; a delivery of reports that is not answered 2xx is never sent again, so what can be understood
is accepted. What a server says goes to the log first and is applied when the log brings it; it is answered when the
log has it, so the log has each server's own order. Token ids that ride along are the prompt in clear: no type here
has a field for them, so they are skipped while parsing and never kept or logged.
docs/decisions/0007-the-store-tells-the-truth.md, docs/decisions/0008-kvindex-scales.md
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from shoal_kvblocks import HASH_BYTES
from shoal_kvindex.directory import Level, Namespace, ObjectKey, Part
from shoal_kvindex.index import Readiness
from shoal_kvindex.ingest.changes import ChangeLog, Reports, Sign, StoreSign
from shoal_kvindex.ingest.gate import Verdict
from shoal_kvindex.ingest.instances import StoreInstances
from shoal_kvindex.ingest.reports import Kind, Report, ReportSource
from shoal_kvindex.ingest.split import MESSAGE_BYTES, report_bytes
from shoal_kvindex.metrics import REPORTS
from shoal_runtime.logs import get_logger

log = get_logger(__name__)

MAX_BODY_BYTES = 64 << 20  # 10,000 objects with their token ids are about 10 MiB

# What Postgres can hold and index (signed integers, names of 2,704 bytes together), and what fits in a path or an
# address. LMCache's own limit of a salt is 128 characters.
Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,200}$")]
Host = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,253}$")]
Name = Annotated[str, Meta(pattern=r"^[\x20-\x7e]{1,512}$")]
Salt = Annotated[str, Meta(max_length=128, pattern=r"^[^\x00-\x1f]*$")]
Bytes = Annotated[int, Meta(ge=0, le=2**40)]
Int32 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Int63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Hash = Annotated[str, Meta(min_length=64, max_length=64)]


class Registration(msgspec.Struct):
    """Body of POST /instances."""

    instance_id: Id
    ip: Host
    http_port: Annotated[int, Meta(ge=1, le=65535)]


class WireKey(msgspec.Struct):
    """The store's full name of one object."""

    chunk_hash_hex: Hash
    model_name: Name  # the pool: engines give it to the store as the model's name
    kv_rank: Int63
    object_group_id: Int32
    cache_salt: Salt = ""


class WireEntry(msgspec.Struct):
    """One object of a batch."""

    key: WireKey
    size_bytes: Bytes = 0


class WireBatch(msgspec.Struct):
    """One numbered report."""

    instance_id: Id
    incarnation: Int63
    seq: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    event_type: str
    tier: str
    entries: list[WireEntry] = []
    shared: bool = False
    capacity_bytes: Int63 = 0


class Events(msgspec.Struct):
    """Body of POST /events."""

    batches: list[WireBatch]


KINDS = {"store": Kind.STORE, "delete": Kind.DELETE, "config": Kind.CAPACITY}
LEVELS = {"l1": Level.L1, "l2": Level.L2}

_decode_events = msgspec.json.Decoder(Events).decode
_decode_registration = msgspec.json.Decoder(Registration).decode


class CoordinatorApi:
    """Handlers; on the loop that also answers requests."""

    def __init__(self, log: ChangeLog, instances: StoreInstances, readiness: Readiness) -> None:
        self._log = log
        self._instances = instances
        self._readiness = readiness

    def app(self) -> Starlette:
        """Every path of the protocol."""
        return Starlette(
            routes=[
                Route("/instances", self._register, methods=["POST"]),
                Route("/instances/{instance_id}/heartbeat", self._beat, methods=["PUT"]),
                Route("/instances/{instance_id}", self._deregister, methods=["DELETE"]),
                Route("/events", self._report, methods=["POST"]),
            ],
            exception_handlers={ClientDisconnect: _nobody_there},
        )

    async def _register(self, request: Request) -> Response:
        body = await _read_body(request)
        if body is None:
            return _too_large()
        if not self._readiness.is_loaded:
            return _loading()
        try:
            registration = _decode_registration(body)
        except (msgspec.DecodeError, RecursionError) as error:
            return _refusal(400, str(error))
        instance_id = registration.instance_id
        is_again = self._instances.is_registered(instance_id)  # so it started anew, with an empty DRAM
        at = (registration.ip, registration.http_port)
        await self._log.publish(StoreSign(instance_id, Sign.REGISTERED, *at, is_l1_void=is_again))
        log.info("store.registered", store_instance_id=instance_id, re_registered=is_again)
        return _answer({"instance_id": instance_id, "re_registered": is_again})

    async def _beat(self, request: Request) -> Response:
        if not self._readiness.is_loaded:
            return _loading()
        instance_id = request.path_params["instance_id"]
        at = self._instances.address_of(instance_id)
        if at is None:
            return _refusal(404, f"unknown instance {instance_id}; re-register")
        capacity_bytes = self._instances.capacity_of(instance_id)
        await self._log.publish(StoreSign(instance_id, Sign.BEAT, at.host, at.http_port, capacity_bytes))
        return _answer({"instance_id": instance_id})

    async def _deregister(self, request: Request) -> Response:
        instance_id = request.path_params["instance_id"]
        if self._instances.is_known(instance_id):
            await self._log.publish(StoreSign(instance_id, Sign.LEFT))
        return Response(status_code=204)

    async def _report(self, request: Request) -> Response:
        body = await _read_body(request)
        if body is None:
            return _too_large()
        if not self._readiness.is_loaded:
            return _loading()
        try:
            reports = to_reports(_decode_events(body).batches)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            REPORTS.labels("malformed").inc()
            log.warning("reports.refused", reason=str(error))
            return _refusal(400, str(error))
        if any(report_bytes(report) > MESSAGE_BYTES for report in reports):
            REPORTS.labels("too_large").inc()
            return _too_large()
        summary = await self._log.publish(Reports(reports))
        duplicates = summary.verdicts[Verdict.DUPLICATE] if summary else 0
        stale = summary.verdicts[Verdict.STALE] if summary else 0
        applied = len(reports) - duplicates - stale
        return _answer({"applied": applied, "duplicates": duplicates, "stale": stale})


def to_reports(batches: Sequence[WireBatch]) -> list[Report]:
    """The domain's reports. ValueError for a hash that is not hexadecimal.

    Kinds and tiers that this version does not know count for the cursor and change nothing.
    """
    keys = KeyReader()
    reports = []
    for batch in batches:
        level = LEVELS.get(batch.tier)
        kind = KINDS.get(batch.event_type, Kind.OTHER) if level is not None else Kind.OTHER
        objects = []
        for entry in batch.entries if kind in (Kind.STORE, Kind.DELETE) else ():
            objects.append((keys.read(entry.key), entry.size_bytes))
        source = ReportSource(batch.instance_id, batch.incarnation, batch.seq)
        capacity_bytes = batch.capacity_bytes if kind is Kind.CAPACITY else 0
        reports.append(Report(source, kind, level or Level.L1, batch.shared, objects, capacity_bytes))
    return reports


class KeyReader:
    """The directory's keys for the store's names, for one message. Equal names become one object: they live on as
    keys of the directory and of pending changes."""

    def __init__(self) -> None:
        self._namespaces: dict[tuple[str, str], Namespace] = {}
        self._parts: dict[tuple[int, int], Part] = {}

    def read(self, key: WireKey) -> ObjectKey:
        """ValueError when the hash is none: Python's own reading passes over spaces."""
        block_hash = bytes.fromhex(key.chunk_hash_hex)
        if len(block_hash) != HASH_BYTES:
            raise ValueError("a hash has 64 hexadecimal digits")
        name, part = (key.model_name, key.cache_salt), (key.kv_rank, key.object_group_id)
        namespace = self._namespaces.setdefault(name, Namespace(*name))
        return ObjectKey(namespace, block_hash, self._parts.setdefault(part, Part(*part)))


async def _read_body(request: Request) -> bytes | None:
    """None when it is over the limit."""
    pieces = bytearray()
    async for piece in request.stream():
        pieces += piece
        if len(pieces) > MAX_BODY_BYTES:
            return None
    return bytes(pieces)


def _answer(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def _refusal(status: int, reason: str) -> Response:
    return _answer({"error": reason}, status)


def _too_large() -> Response:
    return _refusal(413, f"a delivery may have {MAX_BODY_BYTES} bytes, and a report about 90,000 objects")


def _nobody_there(request: Request, error: Exception) -> Response:
    """A server that dies while it sends is no failure of ours; what it sent in part shows as a gap."""
    return _refusal(400, "the body broke off")


def _loading() -> Response:
    return _refusal(503, "the directory is still loading")
