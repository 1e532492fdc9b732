"""The gateway's composition root: what exists, in start order.

Teardown is the reverse: the HTTP server ends its requests first, while every link they may still have to cancel on
is open; NATS and Postgres close last. What runs in the background ends before that, with the tasks of the process.
"""

import asyncio
from datetime import timedelta

from shoal_contracts.ids import new_request_id
from shoal_contracts.v1 import fleet_pb2
from shoal_gateway import metrics
from shoal_gateway.admission import AdmissionGate
from shoal_gateway.api.endpoint import Endpoint, Exchanges, answer_work, count_work
from shoal_gateway.api.models import Models
from shoal_gateway.api.ops import Ops
from shoal_gateway.api.responses import StoredResponses
from shoal_gateway.app import create_app
from shoal_gateway.background import BackgroundRuns
from shoal_gateway.history import AnswerHistory
from shoal_gateway.http_server import HttpServer
from shoal_gateway.lifecycle import River
from shoal_gateway.links.cancels import ResponseCancels
from shoal_gateway.links.decode import DecodeLinks
from shoal_gateway.links.kvindex import KvIndexLink
from shoal_gateway.links.peers import meet
from shoal_gateway.links.prefill import PrefillLink
from shoal_gateway.links.tokenizer import TokenizerLinks
from shoal_gateway.pace import PrefillPaces
from shoal_gateway.presence import PresenceLimits
from shoal_gateway.readiness import ProbeLimits, ReadinessProbe
from shoal_gateway.request import Api
from shoal_gateway.settings import GatewaySettings
from shoal_gateway.steps.encode import EncodeStep
from shoal_gateway.steps.match import Affinity, MatchStep
from shoal_gateway.steps.place import PlaceLimits, PlaceStep
from shoal_gateway.steps.prefill import PrefillLimits, PrefillStep
from shoal_gateway.steps.settle import SettleStep
from shoal_gateway.steps.stream import StreamLimits
from shoal_gateway.store.engine import create_engine
from shoal_gateway.store.responses import PostgresResponses
from shoal_gateway.store.watch import StoreWatch
from shoal_policy import AdmissionPolicy, AffinityPolicy, PlacementPolicy, parse_tiers
from shoal_runtime.logs import get_logger
from shoal_runtime.nats import NatsConnection, connect
from shoal_runtime.presence import Announcer, Fleet, Presence
from shoal_runtime.process import Process

log = get_logger(__name__)

PEERS = (fleet_pb2.TOKENIZER, fleet_pb2.KVINDEX, fleet_pb2.PREFILL, fleet_pb2.DECODE)
NEEDED = (fleet_pb2.TOKENIZER, fleet_pb2.DECODE)  # without one of each nothing is served
MEET_S = 2.0  # two beats


class GatewayService:
    """HTTP in, events out; see ``shoal_runtime.process.Service``."""

    name = "gateway"

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._admission = AdmissionGate(
            AdmissionPolicy(settings.max_running_requests, settings.max_waiting_requests), settings.admission_wait_s
        )
        self._server: HttpServer | None = None
        self._background: BackgroundRuns | None = None

    @property
    def port(self) -> int:
        """Where the API listens; after ``start``."""
        assert self._server is not None
        return self._server.port

    async def start(self, process: Process) -> None:
        settings = self._settings
        # The address is taken first: a second gateway on it must fail before it is seen by anybody.
        server = self._server = HttpServer(settings.host, settings.port)
        process.stack.push_async_callback(server.close)
        responses = self._start_responses(process)
        nats = await connect(process, settings.nats_url)
        fleet = Fleet(process, nats, PEERS)
        await fleet.start()
        decode = DecodeLinks(process, fleet)
        river = await self._build_river(process, nats, fleet, decode, responses)
        cancels = ResponseCancels(nats, river.background)
        await cancels.start()
        probe = ReadinessProbe(
            river, decode, ProbeLimits(settings.probe_keep_s, settings.probe_s), process.clock, new_request_id
        )
        app = create_app(
            _endpoints(river, Exchanges(self._presence_limits())),
            StoredResponses(responses, cancels, process.clock),
            Models(decode, created_s=int(process.clock.now())),
            Ops(process.health, probe, self._admission),
        )
        await meet(fleet, NEEDED, MEET_S)  # who connects meanwhile waits in the listener's queue
        await server.start(app, settings.drain_s)
        process.stack.push_async_callback(server.close)  # again, and now before the links
        await Announcer(process, nats, fleet_pb2.GATEWAY, Presence).start()
        log.info("gateway.listening", host=settings.host, port=self.port)

    def _start_responses(self, process: Process) -> PostgresResponses:
        settings = self._settings
        engine = create_engine(settings.postgres.database_url)
        process.stack.push_async_callback(engine.dispose)
        responses = PostgresResponses(engine, timedelta(days=settings.response.retention_days))
        watch = StoreWatch(settings.postgres.database_url, engine, responses, process.clock, process.health)
        process.tasks.spawn(watch.run, name="store_watch", restart=True)
        return responses

    async def _build_river(
        self,
        process: Process,
        nats: NatsConnection,
        fleet: Fleet,
        decode: DecodeLinks,
        responses: PostgresResponses,
    ) -> River:
        settings = self._settings
        tokenizers = TokenizerLinks(process, fleet, settings.encode_s)
        index = KvIndexLink(process, fleet, settings.match_s, settings.handoff_level)
        prefill = PrefillLink(process, nats, fleet)
        await prefill.start()
        history = AnswerHistory(settings.answer_memory_bytes)
        paces = PrefillPaces()
        background = self._background = BackgroundRuns(process.tasks)
        return River(
            admission=self._admission,
            encode=EncodeStep(tokenizers, decode, responses),
            match=MatchStep(index, history, Affinity(AffinityPolicy(), paces), process.clock),
            prefill=PrefillStep(prefill, self._prefill_limits(), paces, process.clock),
            place=PlaceStep(
                decode,
                PlacementPolicy(settings.long_from_tokens),
                PlaceLimits(settings.accept_s, settings.place_wait_s),
                process.clock,
            ),
            settle=SettleStep(index, history, metrics.count),
            tokenizers=tokenizers,
            clock=process.clock,
            stream_limits=StreamLimits(settings.place_attempts, settings.event_attempts, settings.event_wait_s),
            budget_s=settings.request_budget_s,
            responses=responses,
            background=background,
        )

    async def drain(self) -> None:
        """Close the listener and let what runs end. Presence has told everybody already."""
        assert self._server is not None and self._background is not None
        await asyncio.gather(self._server.drain(), self._background.drain())

    def _prefill_limits(self) -> PrefillLimits:
        settings = self._settings
        return PrefillLimits(settings.prefill_attempts, settings.prefill_answer_s, parse_tiers(settings.tiers))

    def _presence_limits(self) -> PresenceLimits:
        settings = self._settings
        return PresenceLimits(
            max_body_bytes=settings.max_body_bytes,
            body_wait_s=settings.body_wait_s,
            head_wait_s=settings.head_wait_s,
            keep_alive_s=settings.keep_alive_s,
            max_pending_bytes=settings.max_pending_bytes,
        )


def _endpoints(river: River, exchanges: Exchanges) -> list[Endpoint]:
    answer = answer_work(river)
    return [
        *(Endpoint(api.value, api, exchanges, answer) for api in Api),
        Endpoint(f"{Api.MESSAGES.value}/count_tokens", Api.MESSAGES, exchanges, count_work(river.tokenizers)),
    ]
