"""Settings from the environment, read once; a name that nobody knows stops the start.

A field ``f`` of service ``gateway`` is set by ``SHOAL_GATEWAY_F``. Fields declared by ``ServiceSettings`` itself
may also be set for all services at once by ``SHOAL_F``; the service's own variable wins. Sequences are written
with commas. A variable under the own prefix that names no field is refused with the nearest names, because a
misspelled setting is otherwise found in production.
"""

import difflib
import os
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PREFIX = "SHOAL_"


class EnvironmentSettings(BaseModel):
    """A group of settings under one prefix; frozen after ``load``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shared_fields: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def load(cls, group: str, environ: Mapping[str, str] = os.environ) -> Self:
        """Read ``SHOAL_<GROUP>_<FIELD>``. Raises SystemExit with a message for the operator."""
        own_prefix = f"{PREFIX}{group.upper()}_"
        fields = cls.model_fields
        _refuse_unknown(own_prefix, fields, environ)
        values: dict[str, Any] = {}
        for name, field in fields.items():
            variables = [own_prefix + name.upper()]
            if name in cls.shared_fields:
                variables.append(PREFIX + name.upper())
            for variable in variables:
                if variable in environ:
                    values[name] = _parse(environ[variable], field.annotation)
                    break
        try:
            return cls(**values)
        except ValidationError as error:
            lines = [f"  {own_prefix}{'.'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors()]
            raise SystemExit("settings are not valid:\n" + "\n".join(lines)) from None


def _refuse_unknown(own_prefix: str, fields: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    known = [own_prefix + name.upper() for name in fields]
    for variable in sorted(environ):
        if variable.startswith(own_prefix) and variable not in known:
            near = difflib.get_close_matches(variable, known, n=3) or known
            raise SystemExit(f"{variable} is no setting. Did you mean: {', '.join(near)}?")


def _parse(text: str, annotation: Any) -> Any:
    """Split what is declared as a sequence; pydantic reads the rest."""
    candidates = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if any(typing.get_origin(candidate) in (tuple, list, frozenset) for candidate in candidates):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


class ServiceSettings(EnvironmentSettings):
    """What every service has; subclasses add their own fields."""

    nats_url: str = Field("nats://127.0.0.1:4222", description="Where NATS listens.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="DEBUG to follow one request.")
    instance_id: str = Field("", description="Set for a name that outlives restarts; empty makes a fresh one.")
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 when other machines must reach it.")
    advertise_host: str = Field("127.0.0.1", description="Address that other instances use to reach this one.")
    grpc_port: int = Field(0, ge=0, le=65535, description="0 takes a free port; peers learn it by presence.")
    ops_port: int = Field(0, ge=0, le=65535, description="Port of /healthz, /readyz and /metrics; 0 takes a free one.")
    drain_s: float = Field(20.0, ge=0, le=3600, description="Raise when requests run longer than this at a rollout.")
    otlp_endpoint: str = Field("", description="OTLP gRPC endpoint that receives traces; empty exports none.")


ServiceSettings.shared_fields = frozenset(ServiceSettings.model_fields)
