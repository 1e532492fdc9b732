"""Settings from the environment, read once; a name that nobody knows stops the start.

A field ``f`` of service ``gateway`` is set by ``SHOAL_GATEWAY_F``. Fields declared by ``ServiceSettings`` itself
may also be set for all services at once by ``SHOAL_F``; the service's own variable wins. A field may be a group of
settings, a policy: ``days`` of its field ``response`` is set by ``SHOAL_GATEWAY_RESPONSE_DAYS``. Sequences are written
with commas. A secret may be given by a file, named in ``<VARIABLE>_FILE``, so that no environment shows it; line ends
around it are not part of it. A variable under the own prefix that names no field is refused with the nearest names,
because a misspelled setting is otherwise found in production. A wrong setting ends the process with a code of its own,
so that who started it knows that another try is in vain.
"""

import difflib
import ipaddress
import os
import socket
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

PREFIX = "SHOAL_"
FILE_SUFFIX = "_FILE"
SETTINGS_WRONG = 78  # the exit code; EX_CONFIG of sysexits.h


class SettingsWrong(SystemExit):
    """The message, for the operator, was written to standard error, which an exit code leaves to us."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = SETTINGS_WRONG
        print(message, file=sys.stderr)


class EnvironmentSettings(BaseModel):
    """A group of settings under one prefix; frozen after ``load``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shared_fields: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def load(cls, group: str, environ: Mapping[str, str] = os.environ) -> Self:
        """Read ``SHOAL_<GROUP>_<FIELD>``. Raises SettingsWrong."""
        own_prefix = f"{PREFIX}{group.upper()}_"
        _refuse_unknown(own_prefix, list(cls._variables(own_prefix)), environ)
        told_by: dict[tuple[str, ...], str] = {}
        values = cls._read(own_prefix, environ, told_by)
        try:
            return cls(**values)
        except ValidationError as error:
            raise SettingsWrong(_not_valid(error, own_prefix, told_by)) from None

    @classmethod
    def groups(cls) -> dict[str, "type[EnvironmentSettings]"]:
        """Fields that are settings of their own, by name."""
        annotations = ((name, field.annotation) for name, field in cls.model_fields.items())
        return {
            name: kind for name, kind in annotations if isinstance(kind, type) and issubclass(kind, EnvironmentSettings)
        }

    @classmethod
    def _variables(cls, prefix: str) -> Iterator[str]:
        groups = cls.groups()
        for name, field in cls.model_fields.items():
            variable = prefix + name.upper()
            if name in groups:
                yield from groups[name]._variables(f"{variable}_")
                continue
            yield variable
            if field.annotation is SecretStr:
                yield variable + FILE_SUFFIX

    @classmethod
    def _read(cls, prefix: str, environ: Mapping[str, str], told_by: dict[tuple[str, ...], str]) -> dict[str, Any]:
        """What is set, and in ``told_by`` under which variable each field was."""
        groups, values = cls.groups(), dict[str, Any]()
        for name, field in cls.model_fields.items():
            if name in groups:
                told: dict[tuple[str, ...], str] = {}
                values[name] = groups[name]._read(f"{prefix}{name.upper()}_", environ, told)
                told_by |= {(name, *path): variable for path, variable in told.items()}
                continue
            variables = [prefix + name.upper()]
            if name in cls.shared_fields:
                variables.append(PREFIX + name.upper())
            for variable in variables:
                text = _text_of(variable, environ, may_be_file=field.annotation is SecretStr)
                if text is not None:
                    values[name] = _parse(text, field.annotation)
                    told_by[name,] = variable
                    break
        return values


def _not_valid(error: ValidationError, own_prefix: str, told_by: Mapping[tuple[str, ...], str]) -> str:
    """Each wrong value by the name under which it was given."""
    lines = ["settings are not valid:"]
    for told in error.errors():
        path = tuple(part for part in told["loc"] if isinstance(part, str))  # (): several fields contradict each other
        known = [told_by[path[:length]] for length in range(len(path), 0, -1) if path[:length] in told_by]
        variable = known[0] if known else own_prefix + "_".join(path).upper()
        lines.append(f"  {variable}: {told['msg']}" if path else f"  {told['msg']}")
    return "\n".join(lines)


def _refuse_unknown(own_prefix: str, known: Sequence[str], environ: Mapping[str, str]) -> None:
    for variable in sorted(environ):
        if variable.startswith(own_prefix) and variable not in known:
            near = difflib.get_close_matches(variable, known, n=3) or known
            raise SettingsWrong(f"{variable} is no setting. Did you mean: {', '.join(near)}?")


def _text_of(variable: str, environ: Mapping[str, str], *, may_be_file: bool) -> str | None:
    """What ``variable`` says, itself or by a file; None when nobody set it."""
    by_file = variable + FILE_SUFFIX
    if not may_be_file or by_file not in environ:
        return environ.get(variable)
    if variable in environ:
        raise SettingsWrong(f"{variable} and {by_file} are both set: keep one of them")
    try:
        return Path(environ[by_file]).read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is no text"
        raise SettingsWrong(f"{by_file}={environ[by_file]} cannot be read: {reason}") from None


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
    advertise_host: str = Field(
        "", description="Where others reach this instance; empty: its host name, or loopback if it listens on that."
    )
    grpc_port: int = Field(0, ge=0, le=65535, description="0 takes a free port; peers learn it by presence.")
    ops_port: int = Field(0, ge=0, le=65535, description="Port of /healthz, /readyz and /metrics; 0 takes a free one.")
    drain_s: float = Field(20.0, ge=0, le=3600, description="Raise when requests run longer than this at a rollout.")
    otlp_endpoint: str = Field("", description="OTLP gRPC endpoint that receives traces; empty exports none.")

    @property
    def reachable_host(self) -> str:
        """What this instance tells others about where it is."""
        return reachable_host(self.host, self.advertise_host)


ServiceSettings.shared_fields = frozenset(ServiceSettings.model_fields)


def reachable_host(host: str, advertise_host: str) -> str:
    """The host that others use for a listener on ``host``. A container's own name is known in its network."""
    if advertise_host:
        return advertise_host
    if is_loopback(host):
        return host
    return socket.gethostname() if _is_wildcard(host) else host


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on ``host``."""
    if host == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def _is_wildcard(host: str) -> bool:
    address = _address(host)
    return not host or (address is not None and address.is_unspecified)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None  # a name
