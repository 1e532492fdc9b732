"""What `shoal up` can be told, from the environment: where it keeps things, which model, which engine.

Every other ``SHOAL_*`` variable passes through to the services as it is, so that each of their settings can be set
from the outside too.
"""

import os
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from shoal_model.settings import ModelSettings


def _state_dir() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "shoal"


class LocalSettings(ModelSettings):
    """Each is set by ``SHOAL_<FIELD>``, or by ``SHOAL_LOCAL_<FIELD>`` for this program alone."""

    home: Path = Field(default_factory=_state_dir, description="Logs, Postgres, NATS and stored KV. One system each.")
    engine_kind: Literal["vllm", "scripted"] = Field("vllm", description="scripted: no model computes, for tests.")
    nats_url: str = Field("", description="NATS of a system elsewhere, for `shoal status` and the like.")
    url: str = Field("", description="Gateway of a system elsewhere, for `shoal chat` and `shoal bench`.")
    gateway_host: str = Field("127.0.0.1", description="0.0.0.0 to be reached from other machines.")
    gateway_port: int = Field(8000, ge=1, le=65535, description="Another one when the port is taken.")
    store_l1_gib: float = Field(1.0, gt=0, le=4096, description="DRAM that keeps recent KV. Raise for long prompts.")
    start_timeout_s: float = Field(600.0, gt=0, le=7200, description="How long until everything must be ready.")
    drain_timeout_s: float = Field(30.0, gt=0, le=3600, description="How long an orderly stop may take in all.")

    shared_fields: ClassVar[frozenset[str]] = frozenset()

    @property
    def gateway_url(self) -> str:
        """Where a client on this machine finds the gateway."""
        host = "127.0.0.1" if self.gateway_host in ("0.0.0.0", "::") else self.gateway_host
        return f"http://[{host}]:{self.gateway_port}" if ":" in host else f"http://{host}:{self.gateway_port}"


LocalSettings.shared_fields = frozenset(LocalSettings.model_fields)
