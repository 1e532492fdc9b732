"""Metrics: one catalogue per service, declared at module level, each entry saying what to do when it moves.

A catalogue has a registry of its own, so that a process shows exactly what its service declares plus ``RUNTIME``.
``entries`` feeds docs/reference/metrics.md. Labels are enums, never ids; ratios are two counters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_BUCKETS = (128, 512, 2048, 8192, 16384, 65536, 262144, 1048576)


@dataclass(frozen=True, slots=True)
class Entry:
    """One metric as the reference shows it."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    action: str


class Catalogue:
    """All metrics of one service. Names get the catalogue's prefix: ``shoal_gateway`` + ``requests_total``."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.registry = CollectorRegistry()
        self.entries: list[Entry] = []

    def counter(self, name: str, help: str, labels: Sequence[str] = (), *, action: str) -> Counter:
        """``name`` ends with ``_total``."""
        return Counter(self._declare(name, "counter", help, labels, action), help, labels, registry=self.registry)

    def gauge(self, name: str, help: str, labels: Sequence[str] = (), *, action: str) -> Gauge:
        return Gauge(self._declare(name, "gauge", help, labels, action), help, labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        help: str,
        labels: Sequence[str] = (),
        *,
        action: str,
        buckets: Sequence[float] = LATENCY_BUCKETS_S,
    ) -> Histogram:
        """``name`` ends with its unit: ``_seconds``, ``_tokens``, ``_bytes``."""
        full_name = self._declare(name, "histogram", help, labels, action)
        return Histogram(full_name, help, labels, registry=self.registry, buckets=tuple(buckets))

    def value(self, name: str, **labels: str) -> float:
        """The current value of one series, 0 when it never moved; for tests and load reports."""
        return self.registry.get_sample_value(f"{self.prefix}_{name}", labels) or 0.0

    def _declare(self, name: str, kind: str, help: str, labels: Sequence[str], action: str) -> str:
        full_name = f"{self.prefix}_{name}"
        self.entries.append(Entry(full_name, kind, help, tuple(labels), action))
        return full_name


def exposition(catalogues: Iterable[Catalogue]) -> bytes:
    """What /metrics answers, in Prometheus' text format."""
    return b"".join(generate_latest(catalogue.registry) for catalogue in catalogues)


RUNTIME = Catalogue("shoal_runtime")

TASK_CRASHES = RUNTIME.counter(
    "task_crashes_total",
    "Background tasks that ended with an exception.",
    ["task"],
    action="Read the traceback in the log (event task.crashed); each one is a bug.",
)
NATS_DISCONNECTS = RUNTIME.counter(
    "nats_disconnects_total",
    "Times the connection to NATS was lost.",
    action="Check NATS and the network; while it is away, presence is frozen and no job can be queued.",
)
RPC_FAILURES = RUNTIME.counter(
    "rpc_failures_total",
    "gRPC calls answered with an error, by method and error code.",
    ["method", "code"],
    action="BUG needs a fix now; UNAVAILABLE and PEER_SILENT point at the peer.",
)
BEATS_FENCED = RUNTIME.counter(
    "beats_fenced_total",
    "Beats of an incarnation older than one already seen.",
    action="Two processes run under one instance_id, or an old one would not die.",
)
STREAMS_LOST = RUNTIME.counter(
    "streams_lost_total",
    "Long-lived gRPC streams that ended without being closed by us, by error code.",
    ["code"],
    action="Look at the peer; its requests were placed again or failed.",
)
