"""The composition root of a decode worker. Read this file to know the service.

Start: engine, placements, gRPC, presence: nobody hears of this worker before it can serve. Leaving: refuse new
placements, tell the fleet, let what runs end within the drain time; then what is left ends as LEAVING, its gateways
hear that, and only then do the server and the engine go.
"""

from shoal_contracts.v1 import decode_pb2_grpc, fleet_pb2
from shoal_decode import metrics
from shoal_decode.grpc_api import DecodeApi
from shoal_decode.load_report import limits_of, presence_of
from shoal_decode.placements import Placements
from shoal_decode.settings import DecodeSettings
from shoal_engine import EngineRole, EngineSettings, build_engine
from shoal_engine.api import Engine
from shoal_engine.watch import EngineWatch
from shoal_runtime import nats
from shoal_runtime.grpc import create_server, serve
from shoal_runtime.http import serve_ops
from shoal_runtime.presence import Announcer, Presence
from shoal_runtime.process import Process


class DecodeService:
    """Takes placements from gateways and streams tokens back."""

    name = "decode"

    def __init__(self, settings: DecodeSettings, engine: Engine | None = None) -> None:
        self._settings = settings
        self._engine = engine or build_engine(EngineSettings.load(), EngineRole.DECODE)

    async def start(self, process: Process) -> None:
        """Raises EngineFailed when the engine cannot start."""
        engine, settings = self._engine, self._settings
        process.stack.push_async_callback(engine.stop)  # also after a failed start
        await engine.start()
        metrics.FAILED_LOADS.set_function(lambda: engine.load().failed_loads)

        self._limits = limits_of(
            engine.description, engine.load(), settings.max_running_requests, settings.max_local_prefill_tokens
        )
        self._placements = Placements(
            engine, self._limits, lambda stream: process.tasks.spawn(stream, name="token_stream")
        )

        api = DecodeApi(self._placements, process.clock, settings.max_unread_tokens)
        server = create_server(process)
        decode_pb2_grpc.add_DecodeServicer_to_server(api, server)
        self.address = await serve(process, server)
        process.stack.push_async_callback(api.close)  # before the server stops: last ends are still written
        await serve_ops(process, metrics.CATALOGUE)

        connection = await nats.connect(process, settings.nats_url)
        self._announcer = Announcer(process, connection, fleet_pb2.DECODE, self._describe)
        await self._announcer.start()
        watch = EngineWatch(
            engine, process, settings.check_each_s, on_store=metrics.STORE_LOST.set, on_death=self._placements.leave
        )
        process.tasks.spawn(watch.run, name="engine_watch", critical=True)

    def _describe(self) -> Presence:
        engine = self._engine
        return presence_of(self.address, engine.description, self._limits, self._placements.occupancy(), engine.load())

    def leave(self) -> None:
        """Refuse new placements from now on."""
        self._placements.leave()

    async def drain(self) -> None:
        self.leave()
        await self._announcer.beat()
        await self._placements.drain()
