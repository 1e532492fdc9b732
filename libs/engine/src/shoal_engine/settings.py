"""Which engine a worker runs and how large it may become: ``SHOAL_ENGINE_<FIELD>``, read once at start.

One model for both kinds, so that prefill and decode workers of one pool are set the same way. What only the
scripted engine knows stands with it, under a prefix of its own.
"""

import enum
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from shoal_runtime.settings import EnvironmentSettings


class EngineKind(enum.Enum):
    """Which implementation of ``shoal_engine.api.Engine``."""

    VLLM = "vllm"
    SCRIPTED = "scripted"


class EngineRole(enum.Enum):
    """What a worker uses its engine for; a profile may differ between the two."""

    PREFILL = "prefill"
    DECODE = "decode"


class EngineSettings(EnvironmentSettings):
    """Settings of one engine; workers that shall share KV must agree on those that name the pool."""

    kind: EngineKind = Field(EngineKind.VLLM, description="`scripted` for tests, load and simulation: no model.")
    model: str = Field(min_length=1, description="A local folder or a hub id that vLLM serves.")
    revision: str = Field("", description="Pins a hub model; part of the pool. Ignored for a local folder.")
    served_name: str = Field("", description="The name clients ask for. Empty: the last part of `model`.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Of weights and KV. `auto`: the model's own, but float32 on a CPU that only emulates bfloat16. "
        "float32 where outputs must be equal token for token.",
    )
    block_tokens: int = Field(128, ge=32, le=4096, multiple_of=32, description="Raise where a layout demands it.")
    max_context_tokens: int | None = Field(
        None, ge=1, description="Prompt and answer together. Absent: the model's own; lower it to save KV memory."
    )
    max_running_requests: int = Field(16, ge=1, le=4096, description="Requests in one step; the rest wait.")
    max_step_tokens: int = Field(
        256, ge=32, le=1 << 20, description="Tokens computed in one step, 1.6 s on a laptop core. Thousands on a card."
    )
    kv_memory_bytes: int = Field(1 << 29, ge=1 << 20, description="Memory for KV of running and recent requests.")
    cpu_threads: int = Field(
        1, ge=1, le=1024, description="Only without a card: cores that this engine has for itself. More is far slower."
    )
    is_compiled: bool = Field(
        False, description="torch.compile the model: faster steps, a start longer by minutes. For cards."
    )
    profile: tuple[str, ...] = Field(
        (),
        description="YAML files of vLLM's own arguments, later ones win over earlier and over these settings. "
        "`deploy/profiles` has some for cards and for kinds of traffic.",
    )
    store_host: str = Field("127.0.0.1", description="Where this node's `lmcache server` listens.")
    store_port: int = Field(0, ge=0, le=65535, description="Its message queue port. 0: no store, nothing is shared.")
    store_http_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Its HTTP port, to prefetch for jobs that wait. 0: nothing is prefetched.",
    )
    store_timeout_s: float = Field(
        10.0, gt=0, le=300, description="How long a start waits for the store before it fails. Raise for a slow disk."
    )
    start_timeout_s: float = Field(
        300.0, gt=0, le=3600, description="How long a start may take in all. Raise for large weights on slow disks."
    )

    @property
    def shown_name(self) -> str:
        """The name under which clients see the model."""
        return self.served_name or Path(self.model).name

    @classmethod
    def load(cls, group: str = "engine", environ: Mapping[str, str] = os.environ) -> Self:
        """Read the environment; SystemExit with a sentence for the operator when it is wrong."""
        return super().load(group, environ)
