"""The composition root of a prefill worker. Read this file to know the service.

Start: engine, NATS, the client of kvindex, jobs, presence, and last the intake: nothing is taken before it can be
computed and answered. Leaving: take nothing more, tell the fleet, finish what runs within the drain time; what is
left is then given back to the queue, while NATS is still there.
"""

from shoal_contracts import subjects
from shoal_contracts.v1 import fleet_pb2, prefill_pb2
from shoal_engine import EngineRole, EngineSettings, build_engine
from shoal_engine.api import Engine
from shoal_engine.watch import EngineWatch
from shoal_prefill import metrics
from shoal_prefill.intake import Intake
from shoal_prefill.job_source import JetStreamJobSource
from shoal_prefill.kvindex_client import KvIndexClient
from shoal_prefill.load_report import presence_of
from shoal_prefill.prefill_job import JobLimits, PrefillJobs
from shoal_prefill.settings import PrefillSettings
from shoal_runtime import nats
from shoal_runtime.http import serve_ops
from shoal_runtime.presence import Announcer, Fleet, Presence
from shoal_runtime.process import Process
from shoal_runtime.queues import ensure_prefill_queue


class PrefillService:
    """Pulls jobs of its tiers, computes their KV and answers the gateways."""

    name = "prefill"

    def __init__(self, settings: PrefillSettings, engine: Engine | None = None) -> None:
        self._settings = settings
        self._engine = engine or build_engine(EngineSettings.load(), EngineRole.PREFILL)

    async def start(self, process: Process) -> None:
        """Raises EngineFailed when the engine cannot start, Unavailable when NATS is not there."""
        engine, settings = self._engine, self._settings
        process.stack.push_async_callback(engine.stop)  # also after a failed start
        await engine.start()
        description = engine.description

        connection = await nats.connect(process, settings.nats_url)
        fleet = Fleet(process, connection, [fleet_pb2.KVINDEX, fleet_pb2.GATEWAY])
        await fleet.start()
        index = KvIndexClient(
            fleet, settings.handoff_level, lambda closing: process.tasks.spawn(closing, name="index_close")
        )
        process.stack.push_async_callback(index.close)

        limits = JobLimits(settings.max_deliveries, settings.handoff_wait_ms / 1000)
        self._jobs = PrefillJobs(engine, index, limits, process.clock, metrics.count)
        fleet.on_change(lambda: self._jobs.see_callers(_gateways(fleet)))
        metrics.RUNNING_JOBS.set_function(lambda: len(self._jobs))
        metrics.FAILED_LOADS.set_function(lambda: engine.load().failed_loads)
        metrics.FAILED_PREFETCHES.set_function(lambda: engine.load().failed_prefetches)
        await connection.subscribe(
            subjects.prefill_cancel(description.pool),
            prefill_pb2.PrefillCancel,
            lambda cancel: self._jobs.cancel(cancel.request_id),
        )

        await serve_ops(process, metrics.CATALOGUE)
        self._announcer = Announcer(process, connection, fleet_pb2.PREFILL, self._describe)
        await self._announcer.start()
        watch = EngineWatch(engine, process, settings.check_each_s, on_store=metrics.STORE_LOST.set)
        process.tasks.spawn(watch.run, name="engine_watch", critical=True)

        queues = [await ensure_prefill_queue(connection, description.pool, tier) for tier in settings.tiers]
        self._intake = Intake(
            JetStreamJobSource(connection, queues, process.instance_id),
            self._jobs.work,
            lambda job: process.tasks.spawn(job, name="prefill_job"),
            description.max_running_requests,
            process.clock,
        )
        process.tasks.spawn(self._intake.run, name="intake", restart=True)

    def _describe(self) -> Presence:
        return presence_of(
            self._engine.description,
            self._settings.tiers,
            len(self._jobs),
            self._jobs.prompt_tokens,
            self._engine.load(),
        )

    async def drain(self) -> None:
        await self._announcer.beat()
        await self._intake.leave()


def _gateways(fleet: Fleet) -> dict[str, int]:
    """Incarnations of the gateways that live now."""
    return {member.instance_id: member.incarnation for member in fleet.live(fleet_pb2.GATEWAY)}
