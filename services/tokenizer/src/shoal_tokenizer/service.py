"""The composition root of the tokenizer.

Start order: the ops port first, so that a slow load can be watched; then the model; then the gRPC port; presence
last, so that nobody is sent here before everything works. Closing goes the other way round.
"""

import asyncio
from pathlib import PurePath

from shoal_contracts.v1 import tokenizer_pb2_grpc
from shoal_contracts.v1.fleet_pb2 import TOKENIZER
from shoal_runtime import grpc as shoal_grpc
from shoal_runtime import nats
from shoal_runtime.http import serve_ops
from shoal_runtime.logs import get_logger
from shoal_runtime.presence import Announcer, Presence, Served
from shoal_runtime.process import Process
from shoal_tokenizer import metrics
from shoal_tokenizer.encode import RequestEncoder
from shoal_tokenizer.grpc_api import TokenizerApi
from shoal_tokenizer.model_files import load_codec, locate
from shoal_tokenizer.settings import Settings
from shoal_tokenizer.thread_pool import ThreadPool

log = get_logger(__name__)


class TokenizerService:
    """``shoal_runtime.process.Service``."""

    name = "tokenizer"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._api: TokenizerApi | None = None

    async def start(self, process: Process) -> None:
        settings = self._settings
        process.health.set("model", "loading")
        ops_port = await serve_ops(process, metrics.CATALOGUE)
        begin_s = process.clock.monotonic()
        folder = await asyncio.to_thread(locate, settings.model)
        served_name = settings.served_name or PurePath(settings.model).name
        codec = await asyncio.to_thread(
            load_codec,
            folder,
            served_name,
            settings.segment_cache_mib,
            settings.codec,
            drops_billing_line=settings.drops_billing_line,
        )
        log.info("model.loaded", model=served_name, load_s=round(process.clock.monotonic() - begin_s, 2))

        pool = ThreadPool(settings.encode_threads, settings.max_waiting_encodes)
        process.stack.callback(pool.close)
        metrics.ENCODES_TAKEN.set_function(lambda: pool.taken)
        self._api = TokenizerApi(codec, RequestEncoder(codec, pool), process.clock)
        server = shoal_grpc.create_server(process)
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(self._api, server)
        address = await shoal_grpc.serve(process, server)

        bus = await nats.connect(process, settings.nats_url)
        process.health.set("model", None)
        presence = Presence(address, Served(served_name))
        await Announcer(process, bus, TOKENIZER, lambda: presence).start()
        log.info("tokenizer.started", address=address, ops_port=ops_port, model=served_name)

    async def drain(self) -> None:
        if self._api is not None:
            await self._api.drain()
