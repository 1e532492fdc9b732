"""The command line of an ``lmcache server`` with our plugins: the same wherever one is started.

Imports nothing of LMCache: ``local`` and ``testkit`` start one as a child, ``python -m shoal_kvstore`` becomes one.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from shoal_runtime.servers import LOOPBACK, ServerCommand, http_answers, own_program

# LMCache's own flags of the process. PYTHONHASHSEED only names what its older mode would share.
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
}
# It speaks to nobody but kvindex: a proxy that is set for the outside must not see that, whatever else is excepted.
NO_PROXY = {"no_proxy": "*", "NO_PROXY": "*"}


@dataclass(frozen=True, slots=True)
class LmcacheSpec:
    """One ``lmcache server``: L1 in its DRAM, L2 in a directory that all servers of the fleet share."""

    instance_id: str
    shared_directory: Path
    mq_port: int
    http_port: int
    metrics_port: int
    host: str = LOOPBACK  # where it listens, with its queue and with HTTP
    advertise_host: str = LOOPBACK  # where kvindex reaches its HTTP side
    coordinator_url: str = ""  # of kvindex; "": reports to nobody
    block_tokens: int = 128
    l1_gib: float = 0.5
    window_age_s: float = 180.0  # how long sliding-window state that nobody hits stays in its DRAM
    capacity_bytes: int = 0  # of the shared directory, for kvindex to keep to; 0: what is free at the start and its own


def lmcache_argv(spec: LmcacheSpec) -> tuple[str, ...]:
    """The whole command line. ServerUnavailable when LMCache is not installed here."""
    adapter = {
        "type": "plugin",
        "module_path": "shoal_kvstore.file_adapter",
        "class_name": "FileAdapter",
        "adapter_params": {
            "folder": str(spec.shared_directory),
            "server": spec.instance_id,
            "capacity_bytes": spec.capacity_bytes,
        },
        "shared": True,
    }
    module = {"module_path": "shoal_kvstore.server_module", "config": {"window_age_s": spec.window_age_s}}
    argv: tuple[str, ...] = (
        *(own_program("lmcache"), "server", "--host", spec.host, "--port", str(spec.mq_port)),
        *("--http-host", spec.host, "--http-port", str(spec.http_port), "--prometheus-port", str(spec.metrics_port)),
        *("--instance-id", spec.instance_id, "--chunk-size", str(spec.block_tokens)),
        *("--l1-size-gb", str(spec.l1_gib), "--l1-init-size-gb", "1", "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "auto", "--separate-object-groups"),
        *("--l2-adapter", json.dumps(adapter), "--server-module", json.dumps(module)),
    )
    if spec.coordinator_url:
        argv += ("--coordinator-url", spec.coordinator_url, "--coordinator-advertise-ip", spec.advertise_host)
        argv += ("--coordinator-event-reporting", "--coordinator-event-flush-interval", "0.05")
    return argv


def lmcache_server(spec: LmcacheSpec) -> ServerCommand:
    """As a child on this machine, its directory made; ``url`` is its HTTP side, engines connect to ``mq_port``."""
    spec.shared_directory.mkdir(parents=True, exist_ok=True)

    async def is_ready() -> bool:
        return await http_answers(spec.http_port, "/healthcheck")

    name, url = f"lmcache {spec.instance_id}", f"http://{LOOPBACK}:{spec.http_port}"
    return ServerCommand(name, lmcache_argv(spec), is_ready, url, ENVIRON | NO_PROXY)
