"""What an embedded system consists of: the three servers and five services, their settings and their order.

Engines are slow to start, so nothing waits for them that need not: everything starts as soon as what it *needs*
answers. Internal ports are picked once for a run, below the range from which the kernel takes the ports of
outgoing connections, so that a process which starts again finds its port free.
"""

import errno
import os
import random
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import httpx

from shoal_kvstore.command import LmcacheSpec, lmcache_server
from shoal_local.child import ChildSpec
from shoal_local.home import Home
from shoal_local.settings import LocalSettings
from shoal_model import PreparedModel
from shoal_runtime.servers import LOOPBACK, ServerCommand, nats_server, postgres_server, prepare_postgres

PORT_RANGE = range(20000, 32000)
PROBE_TIMEOUT_S = 2.0
GATEWAY_PROBE_TIMEOUT_S = 60.0  # its readiness sends a real request through the engines
ENGINE_READY_S = 400.0
ENGINE_KV_BYTES = str(512 * 1024 * 1024)  # a whole context of the default model, and what else runs beside it
STORE_READY_S = "180"
DRAIN_S = "10"  # of each service; shorter than the whole stop may take
STORE = "lmcache"
# Embedded engines compute on the CPU. Where pip had only PyTorch's build with CUDA, LMCache would take a GPU it saw.
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
ENGINES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of one run, by who listens on them."""

    nats: int
    postgres: int
    store_queue: int
    store_http: int
    store_metrics: int
    coordinator: int
    tokenizer_ops: int
    kvindex_ops: int
    prefill_ops: int
    decode_ops: int

    @classmethod
    def pick(cls) -> "Ports":
        """Ports that are free now."""
        names = cls.__dataclass_fields__
        return cls(**dict(zip(names, _free_ports(len(names)), strict=True)))


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.sample(PORT_RANGE, len(PORT_RANGE)):
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise OSError("no free ports on 127.0.0.1")


def is_port_free(host: str, port: int) -> bool:
    """Whether the gateway could listen there. Raises OSError when ``host`` is no address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            if isinstance(exc, socket.gaierror) or exc.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            return False
    return True


def plan(settings: LocalSettings, home: Home, model: PreparedModel, ports: Ports) -> list[ChildSpec]:
    """Everything to run, prepared. Blocks for 2 s the first time: it creates the Postgres directory."""
    prepare_postgres(home.postgres)
    return specs_of(settings, home, model, ports)


def specs_of(settings: LocalSettings, home: Home, model: PreparedModel, ports: Ports) -> list[ChildSpec]:
    """Everything to run; blocks for nothing."""
    has_store = settings.engine_kind == "vllm"
    environ = _service_environ(ports)
    engine_environ = _engine_environ(settings, model, ports)
    if not has_store:
        engine_environ |= _simulated_store_environ(home, ports)
    return [
        _third_party(nats_server(home.nats, ports.nats)),
        _third_party(postgres_server(home.postgres, ports.postgres), stop_signal=signal.SIGINT),
        *([_store(settings, home, ports)] if has_store else []),
        *_light_services(environ, model, ports),
        *(_engine(role, environ | engine_environ, ports) for role in ENGINES),
        _gateway(environ, settings, ports),
    ]


def _third_party(server: ServerCommand, stop_signal: signal.Signals = signal.SIGTERM) -> ChildSpec:
    return ChildSpec(
        service=server.name,
        argv=server.argv,
        environ={**os.environ, **server.environ},
        is_ready=server.is_ready,
        stop_signal=stop_signal,
    )


def _store(settings: LocalSettings, home: Home, ports: Ports) -> ChildSpec:
    server = lmcache_server(
        LmcacheSpec(
            instance_id="lmcache-local",
            shared_directory=home.blocks,
            mq_port=ports.store_queue,
            http_port=ports.store_http,
            metrics_port=ports.store_metrics,
            coordinator_url=_coordinator_url(ports),
            l1_gib=settings.store_l1_gib,
        )
    )
    return ChildSpec(
        service=STORE,
        argv=server.argv,
        environ={**os.environ, **server.environ, **NO_GPU},
        is_ready=server.is_ready,
        uses=frozenset({"kvindex"}),
        ready_timeout_s=float(STORE_READY_S),
    )


def _coordinator_url(ports: Ports) -> str:
    return f"http://{LOOPBACK}:{ports.coordinator}"


def _service_environ(ports: Ports) -> dict[str, str]:
    own = ("SHOAL_HOME", "SHOAL_MODEL", "SHOAL_MODELS_DIR", "SHOAL_LOCAL_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    inherited.setdefault("SHOAL_DRAIN_S", DRAIN_S)
    # One node, one store: what is in its DRAM is as good as what is on the disk.
    inherited.setdefault("SHOAL_PREFILL_HANDOFF_LEVEL", "any")
    inherited.setdefault("SHOAL_GATEWAY_HANDOFF_LEVEL", "any")
    return inherited | {"SHOAL_NATS_URL": f"nats://{LOOPBACK}:{ports.nats}", "PYTHONUNBUFFERED": "1"}


def _engine_environ(settings: LocalSettings, model: PreparedModel, ports: Ports) -> dict[str, str]:
    fixed = {
        "SHOAL_ENGINE_KIND": settings.engine_kind,
        "SHOAL_ENGINE_MODEL": str(model.folder),
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        **NO_GPU,
    }
    if settings.engine_kind == "vllm":
        fixed |= {"SHOAL_ENGINE_STORE_HOST": LOOPBACK, "SHOAL_ENGINE_STORE_PORT": str(ports.store_queue)}
    chosen = {
        "SHOAL_ENGINE_SERVED_NAME": model.served_name,
        "SHOAL_ENGINE_CPU_THREADS": str(max(1, (os.cpu_count() or 1) // len(ENGINES))),
        "SHOAL_ENGINE_KV_MEMORY_BYTES": ENGINE_KV_BYTES,
        "SHOAL_ENGINE_STORE_TIMEOUT_S": STORE_READY_S,
    }
    return fixed | {name: os.environ.get(name, value) for name, value in chosen.items()}


def _simulated_store_environ(home: Home, ports: Ports) -> dict[str, str]:
    """Scripted engines bring a store of their own, which reports as a real one does."""
    return {
        "SHOAL_SCRIPTED_SHARED_FOLDER": str(home.blocks / "scripted"),
        "SHOAL_SCRIPTED_COORDINATOR_URL": _coordinator_url(ports),
        "SHOAL_SCRIPTED_FLUSH_S": "0.05",
    }


def _postgres_url(ports: Ports) -> str:
    return f"postgresql://postgres@{LOOPBACK}:{ports.postgres}/postgres"


def _light_services(environ: Mapping[str, str], model: PreparedModel, ports: Ports) -> list[ChildSpec]:
    tokenizer = {"SHOAL_TOKENIZER_MODEL": str(model.folder), "SHOAL_TOKENIZER_SERVED_NAME": model.served_name}
    kvindex = {
        "SHOAL_KVINDEX_POSTGRES_URL": _postgres_url(ports),
        "SHOAL_KVINDEX_COORDINATOR_PORT": str(ports.coordinator),
    }
    return [
        _service("tokenizer", {**environ, **tokenizer}, ports.tokenizer_ops, needs=frozenset({"nats"})),
        _service("kvindex", {**environ, **kvindex}, ports.kvindex_ops, needs=frozenset({"nats", "postgres"})),
    ]


def _engine(role: str, environ: Mapping[str, str], ports: Ports) -> ChildSpec:
    ops_port = ports.prefill_ops if role == "prefill" else ports.decode_ops
    has_store = "SHOAL_ENGINE_STORE_PORT" in environ
    if has_store and role == "prefill":  # only its jobs wait where something can be prefetched for them
        environ = {**environ, "SHOAL_ENGINE_STORE_HTTP_PORT": str(ports.store_http)}
    return _service(
        role,
        environ,
        ops_port,
        needs=frozenset({"nats"}),
        # Not needed at the start: importing takes an engine as long as the store takes to start, and then it waits.
        uses=frozenset({"kvindex", STORE} if has_store else {"kvindex"}),
        ready_timeout_s=ENGINE_READY_S,
    )


def _gateway(environ: Mapping[str, str], settings: LocalSettings, ports: Ports) -> ChildSpec:
    own = {
        "SHOAL_GATEWAY_HOST": settings.gateway_host,
        "SHOAL_GATEWAY_PORT": str(settings.gateway_port),
        "SHOAL_GATEWAY_POSTGRES_URL": _postgres_url(ports),
    }
    return ChildSpec(
        service="gateway",
        argv=_module("gateway"),
        environ={**environ, **own},
        is_ready=_http_probe(f"{settings.gateway_url}/readyz", GATEWAY_PROBE_TIMEOUT_S),
        needs=frozenset({"nats", "postgres"}),
        uses=frozenset({"tokenizer", "kvindex", *ENGINES}),
        ready_timeout_s=settings.start_timeout_s,
    )


def _service(
    name: str,
    environ: Mapping[str, str],
    ops_port: int,
    *,
    needs: frozenset[str],
    uses: frozenset[str] = frozenset(),
    ready_timeout_s: float = 60.0,
) -> ChildSpec:
    return ChildSpec(
        service=name,
        argv=_module(name),
        environ={**environ, f"SHOAL_{name.upper()}_OPS_PORT": str(ops_port)},
        is_ready=_http_probe(f"http://{LOOPBACK}:{ops_port}/readyz", PROBE_TIMEOUT_S),
        needs=needs,
        uses=uses,
        ready_timeout_s=ready_timeout_s,
    )


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"shoal_{name}")


def _http_probe(url: str, timeout_s: float) -> Callable[[], Awaitable[bool]]:
    """A question that is answered by status 200."""
    # trust_env off: a proxy that is set for the outside must not see loopback. Plain HTTP needs no certificates.
    client = httpx.AsyncClient(timeout=timeout_s, trust_env=False, verify=False)

    async def is_ready() -> bool:
        try:
            return (await client.get(url)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    return is_ready
