"""Logs: one JSON object a line on stderr, named by an event (``noun.verb_past``) and keys.

Ids of the request at hand are bound to the task by ``bind_context`` and stand in every line below it. Lines of
libraries come out in the same form as event ``log``. Values under names that carry secrets are masked.
"""

import contextlib
import contextvars
import logging
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import msgspec

_NOTHING: Mapping[str, object] = MappingProxyType({})
_CONTEXT: contextvars.ContextVar[Mapping[str, object]] = contextvars.ContextVar("shoal_log_context", default=_NOTHING)
_SECRET_PARTS = ("authorization", "password", "secret", "api_key", "credential")
_MASK = "***"
_encode = msgspec.json.Encoder(enc_hook=str).encode


class Logger:
    """Writes events. Cheap when the level is off: keys are only kept, not formatted."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **keys: object) -> None:
        self._write(logging.DEBUG, event, keys)

    def info(self, event: str, **keys: object) -> None:
        self._write(logging.INFO, event, keys)

    def warning(self, event: str, **keys: object) -> None:
        """A fallback began or ended."""
        self._write(logging.WARNING, event, keys)

    def error(self, event: str, *, exc_info: BaseException | None = None, **keys: object) -> None:
        """Someone must act."""
        self._write(logging.ERROR, event, keys, exc_info)

    def _write(self, level: int, event: str, keys: dict[str, object], exc_info: BaseException | None = None) -> None:
        if self._logger.isEnabledFor(level):
            fields = {**_CONTEXT.get(), **keys}
            self._logger.log(level, event, exc_info=exc_info, extra={"shoal_fields": fields})


def get_logger(name: str) -> Logger:
    """The logger of one module: ``log = get_logger(__name__)``."""
    return Logger(logging.getLogger(name))


@contextlib.contextmanager
def bind_context(**keys: object) -> Iterator[None]:
    """Put ``keys`` into every line that this task, and tasks made inside, writes within the block."""
    token = _CONTEXT.set({**_CONTEXT.get(), **keys})
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def configure(level: str, service: str, instance_id: str) -> None:
    """Send all logging of this process to stderr as JSON. Called once, by ``process.run``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service, instance_id))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for chatty in ("asyncio", "grpc", "nats", "uvicorn", "httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(max(logging.getLevelName(level), logging.WARNING))


class JsonFormatter(logging.Formatter):
    """One record as one line."""

    def __init__(self, service: str, instance_id: str) -> None:
        super().__init__()
        self._fixed = {"service": service, "instance_id": instance_id}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
        }
        fields: Mapping[str, object] | None = getattr(record, "shoal_fields", None)
        if fields is None:
            line |= {"event": "log", "logger": record.name, "message": record.getMessage()}
        else:
            line |= {"event": record.msg, "logger": record.name}
        line |= self._fixed
        line |= _mask(fields or {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _encode(line).decode()


def _mask(fields: Mapping[str, object]) -> dict[str, Any]:
    return {k: _MASK if any(part in k.lower() for part in _SECRET_PARTS) else v for k, v in fields.items()}
