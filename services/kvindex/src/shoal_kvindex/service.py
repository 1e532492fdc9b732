"""kvindex, put together.

Start order, and why: what answers from memory first, then the log between the instances and the lease, then the edges
(they say "unavailable" until the load is done), last the announcement. Closing is the reverse: the edges stop before
the last changes are written, the lease is given back after that, and the connections outlive both.
"""

from dataclasses import dataclass

from shoal_contracts.v1 import fleet_pb2, kvindex_pb2_grpc
from shoal_kvindex.claim_teller import ClaimTeller
from shoal_kvindex.claims import Claims
from shoal_kvindex.coordinator_api import CoordinatorApi
from shoal_kvindex.departures import Departures
from shoal_kvindex.directory import Directory, Journal, Namespace, Place
from shoal_kvindex.explain import Explainer
from shoal_kvindex.grpc_api import KvIndexApi
from shoal_kvindex.grpc_api import Parts as Answering
from shoal_kvindex.housekeeping import Housekeeping, Rhythm, Works
from shoal_kvindex.index import Index, Readiness
from shoal_kvindex.ingest.applier import Applier, Parts
from shoal_kvindex.ingest.apply import Awaited, Ingest
from shoal_kvindex.ingest.completeness import Completeness
from shoal_kvindex.ingest.instances import StoreInstances
from shoal_kvindex.ingest.listing import Lister
from shoal_kvindex.ingest.recorder import ChangeRecorder
from shoal_kvindex.ingest.relay import Relay
from shoal_kvindex.ingest.shared_log import SharedLog
from shoal_kvindex.layouts import ROLES, tell_layouts
from shoal_kvindex.lease import Lease
from shoal_kvindex.log_client import NatsLog
from shoal_kvindex.metrics import CATALOGUE
from shoal_kvindex.overview import StoreView
from shoal_kvindex.ports import Duties
from shoal_kvindex.prefixes import Prefixes
from shoal_kvindex.recent import RecentPrompts
from shoal_kvindex.settings import KvIndexSettings
from shoal_kvindex.store.engine import create_engine
from shoal_kvindex.store.lease import PostgresLeaseStore
from shoal_kvindex.store.recall import DurableRecall
from shoal_kvindex.store.survey import DirectorySurvey
from shoal_kvindex.store.writer import DirectoryWriter
from shoal_kvindex.store_client import HttpStoreClient
from shoal_kvindex.sweep import Known, Sweep, SweepRules
from shoal_kvindex.upkeep import Together, Upkeep, observe
from shoal_kvindex.waiters import Waiters
from shoal_policy import ExpiryPolicy, RoomPolicy
from shoal_runtime import grpc, http, nats
from shoal_runtime.clock import Clock
from shoal_runtime.logs import get_logger
from shoal_runtime.presence import Announcer, Fleet, Presence
from shoal_runtime.process import Process

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Domain:
    """The index without its edges: all that tests of behaviour need."""

    parts: Parts
    index: Index
    applier: Applier
    explainer: Explainer
    store_view: StoreView
    recorder: ChangeRecorder

    @property
    def directory(self) -> Directory:
        return self.parts.directory

    @property
    def ingest(self) -> Ingest:
        return self.parts.ingest

    @property
    def instances(self) -> StoreInstances:
        return self.parts.instances

    @property
    def prefixes(self) -> Prefixes:
        return self.parts.awaited.prefixes


def assemble(settings: KvIndexSettings, journal: Journal, clock: Clock) -> Domain:
    """The one place that joins the parts in memory."""
    relay = Relay(journal, settings.max_claims)
    departures = Departures(settings.max_departures, clock)

    def on_gone(namespace: Namespace, block_hash: bytes, last: Place) -> None:
        is_for_room = directory.marked.get((namespace, block_hash))
        departures.gone(namespace, block_hash, last, is_for_room=is_for_room)

    directory = Directory(relay, settings.max_blocks, on_gone)
    claims = Claims(settings.max_claims, settings.claim_wait_s, relay.collect)
    waiters = Waiters(settings.max_waiters)
    prefixes = Prefixes(settings.max_pending_blocks)
    awaited = Awaited(claims, waiters, prefixes)
    recorder = ChangeRecorder()
    expiry = ExpiryPolicy(
        chat_s=settings.chat_lifetime_s, agent_s=settings.agent_lifetime_s, probe_s=settings.probe_lifetime_s
    )
    index = Index(directory, claims, waiters, expiry, clock)
    parts = Parts(
        directory=directory,
        ingest=Ingest(directory, relay, awaited, recorder, clock, settings.unclaimed_lifetime_s),
        instances=StoreInstances(settings.store_silence_s),
        completeness=Completeness(),
        awaited=awaited,
        relay=relay,
    )
    return Domain(
        parts=parts,
        index=index,
        applier=Applier(parts, clock, observe),
        explainer=Explainer(directory, RecentPrompts(settings.recent_bytes), departures, clock),
        store_view=StoreView(directory, parts.instances, parts.completeness, index, settings.shared_capacity_bytes),
        recorder=recorder,
    )


class KvIndexService:
    """Implements ``shoal_runtime.process.Service``. Address and port are known after ``start``."""

    name = "kvindex"

    def __init__(self, settings: KvIndexSettings) -> None:
        self._settings = settings
        self.address = ""
        self.coordinator_port = 0

    async def start(self, process: Process) -> None:
        settings = self._settings
        engine = create_engine(settings.postgres.database_url)
        process.stack.push_async_callback(engine.dispose)
        writer = DirectoryWriter(engine, settings.max_pending_changes)
        domain = assemble(settings, writer, process.clock)

        connection = await nats.connect(process, settings.nats_url)
        readiness = Readiness()
        lease = self._start_lease(process, readiness)
        shared_log = self._start_log(process, connection, domain)

        recall = DurableRecall(engine, domain.directory, process.clock, settings.recall_deadline_ms / 1000)
        process.tasks.spawn(recall.run, name="recall", restart=True)
        domain.index.recall_from(recall)
        fleet = Fleet(process, connection, ROLES)
        fleet.on_change(lambda: tell_layouts(fleet, domain.directory))
        await fleet.start()

        together = Together(shared_log, lease, writer, process.instance_id)
        upkeep = Upkeep(domain.parts, together, process.clock, process.health)
        process.stack.push_async_callback(upkeep.write)
        process.tasks.spawn(upkeep.load(engine, readiness), name="load", critical=True)
        process.tasks.spawn(lambda: upkeep.write_behind(settings.write_interval_s), name="write_behind", restart=True)
        process.tasks.spawn(upkeep.watch, name="watch", restart=True)
        process.tasks.spawn(upkeep.relay, name="relay", restart=True)
        self._start_housekeeping(process, domain, together, readiness)

        server = grpc.create_server(process)
        answering = Answering(domain.index, domain.prefixes, domain.explainer, domain.store_view)
        teller = ClaimTeller(process.tasks, shared_log)
        api = KvIndexApi(answering, teller.tell, readiness, process.clock)
        kvindex_pb2_grpc.add_KvIndexServicer_to_server(api, server)
        self.address = await grpc.serve(process, server)
        coordinator = CoordinatorApi(shared_log, domain.instances, readiness).app()
        self.coordinator_port = await http.serve_http(process, coordinator, settings.host, settings.coordinator_port)
        await http.serve_ops(process, CATALOGUE)

        await Announcer(process, connection, fleet_pb2.KVINDEX, lambda: Presence(address=self.address)).start()
        log.info("kvindex.listening", address=self.address, coordinator_port=self.coordinator_port)

    def _start_lease(self, process: Process, readiness: Readiness) -> Lease:
        """On an engine of its own: a beat waits for no other question."""
        engine = create_engine(self._settings.postgres.database_url, connections=1)
        process.stack.push_async_callback(engine.dispose)
        lease = Lease(
            PostgresLeaseStore(engine), process.instance_id, process.clock, may_take=lambda: readiness.is_loaded
        )
        process.stack.push_async_callback(lease.give_back)
        process.tasks.spawn(lease.keep, name="lease", restart=True)
        return lease

    def _start_log(self, process: Process, connection: nats.NatsConnection, domain: Domain) -> SharedLog:
        link = NatsLog(connection, process.instance_id, process.clock)
        process.stack.push_async_callback(link.close)
        name = f"{process.instance_id}.{process.incarnation}"
        max_waiting = self._settings.max_pending_changes
        shared_log = SharedLog(link, domain.applier, domain.instances, process.clock, name, max_waiting)
        process.tasks.spawn(shared_log.run, name="log", restart=True)
        process.tasks.spawn(link.watch, name="log_watch", restart=True)
        return shared_log

    def _start_housekeeping(self, process: Process, domain: Domain, together: Together, readiness: Readiness) -> None:
        settings, lease, shared_log = self._settings, together.lease, together.log
        # Long questions on an engine of their own: one for the listing, one for the sweep.
        engine = create_engine(settings.postgres.database_url, connections=2)
        process.stack.push_async_callback(engine.dispose)
        client = HttpStoreClient(domain.instances)
        process.stack.push_async_callback(client.close)
        duties = Duties(client, DirectorySurvey(engine), shared_log, lease, process.clock, lambda: shared_log.is_open)

        def capacity_bytes() -> int | None:
            return settings.shared_capacity_bytes or domain.instances.shared_capacity_bytes

        def is_wanted(namespace: Namespace, block_hash: bytes) -> bool:
            return domain.prefixes.is_wanted(namespace, block_hash, process.clock.monotonic())

        room = RoomPolicy(settings.high_watermark, settings.low_watermark)
        known = Known(domain.directory, is_wanted, capacity_bytes)
        works = Works(
            lister=Lister(duties, domain.directory, domain.recorder),
            sweep=Sweep(duties, known, SweepRules(room, settings.sweep_grace_s)),
            completeness=domain.parts.completeness,
            is_loaded=lambda: readiness.is_loaded,
        )
        rhythm = Rhythm(settings.listing_interval_s, settings.sweep_interval_s)
        housekeeping = Housekeeping(duties, works, rhythm, process.instance_id)
        process.tasks.spawn(lambda: lease.while_held(housekeeping.keep_listed), name="listing", restart=True)
        process.tasks.spawn(lambda: lease.while_held(housekeeping.keep_swept), name="sweep", restart=True)
        process.tasks.spawn(lambda: lease.while_held(housekeeping.keep_counted), name="counting", restart=True)

    async def drain(self) -> None:
        """Nothing to finish: answers are immediate, and waits end with their callers' deadlines."""
