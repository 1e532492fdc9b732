"""What an operator may set for a store that runs by itself: ``SHOAL_KVSTORE_<FIELD>``."""

import socket
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from shoal_kvstore.command import LmcacheSpec
from shoal_runtime.settings import EnvironmentSettings, reachable_host


class KvStoreSettings(EnvironmentSettings):
    """One ``lmcache server`` on each machine with engines. Host and advertised host also by ``SHOAL_<FIELD>``."""

    instance_id: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._:-]{0,200}$",
        description="Set for a name that outlives restarts; empty: after the host name. Each server has its own.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 when engines run in other containers.")
    advertise_host: str = Field(
        "", description="Where kvindex reaches it; empty: its host name, or loopback if it listens on that."
    )
    port: int = Field(5555, ge=1, le=65535, description="Message queue for engines, SHOAL_ENGINE_STORE_PORT there.")
    http_port: int = Field(8655, ge=1, le=65535, description="Admin API without keys: keep it on a closed network.")
    metrics_port: int = Field(9655, ge=1, le=65535, description="Its metrics, and those of our plugins.")
    coordinator_url: str = Field("", description="Of kvindex, http://host:port; empty reports to nobody: no hits.")
    folder: Path = Field(
        Path("/var/lib/shoal/kv"), description="The shared level: the same folder for every server of the fleet."
    )
    capacity_bytes: int = Field(0, ge=0, description="Of that folder; 0: what is free at the start, and its own.")
    l1_gib: float = Field(1.0, gt=0, le=4096, description="DRAM that keeps recent KV. Raise for long prompts.")
    block_tokens: int = Field(128, ge=32, le=4096, multiple_of=32, description="As the engines' own.")
    window_age_s: float = Field(
        180.0, gt=0, le=86_400, description="How long window state that nobody hits stays in DRAM."
    )

    shared_fields: ClassVar[frozenset[str]] = frozenset({"host", "advertise_host"})

    @property
    def spec(self) -> LmcacheSpec:
        """The server that these settings describe."""
        return LmcacheSpec(
            instance_id=self.instance_id or f"kvstore-{socket.gethostname()}",
            shared_directory=self.folder,
            mq_port=self.port,
            http_port=self.http_port,
            metrics_port=self.metrics_port,
            host=self.host,
            advertise_host=reachable_host(self.host, self.advertise_host),
            coordinator_url=self.coordinator_url,
            block_tokens=self.block_tokens,
            l1_gib=self.l1_gib,
            window_age_s=self.window_age_s,
            capacity_bytes=self.capacity_bytes,
        )
