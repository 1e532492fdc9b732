"""Traces by the OpenTelemetry API; the W3C ``traceparent`` passes through whether or not anything is exported.

Without an SDK a span is a no-op that keeps its parent's context, so a header that comes in still goes out.
Spans are named as the RPC or the step of the river they cover.
"""

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, MutableMapping

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

TRACEPARENT = "traceparent"

_TRACER = trace.get_tracer("shoal")  # stands for the provider that ``configure`` sets later, too
_PROPAGATOR = TraceContextTextMapPropagator()


@contextlib.contextmanager
def start_span(name: str, parent: Context | None = None, **attributes: AttributeValue) -> Iterator[Span]:
    """A span around a block; below the current one unless ``parent`` (from ``extract``) says otherwise."""
    with _TRACER.start_as_current_span(name, context=parent, attributes=attributes) as span:
        yield span


def inject(carrier: MutableMapping[str, str]) -> None:
    """Write the current trace's headers into ``carrier``; nothing when there is no trace."""
    _PROPAGATOR.inject(carrier)


def traceparent() -> str | None:
    """The current trace as one header value, for a message of a stream that many requests share."""
    carrier: dict[str, str] = {}
    inject(carrier)
    return carrier.get(TRACEPARENT)


def extract(carrier: Mapping[str, str]) -> Context:
    """The trace that ``carrier`` names, or an empty one."""
    return _PROPAGATOR.extract(carrier)


def adopt(parent: Context) -> None:
    """Make ``parent`` current for the rest of this task. For tasks that serve one call and then end."""
    otel_context.attach(parent)


def configure(endpoint: str, service: str, instance_id: str) -> None:
    """Export spans to an OTLP endpoint. Does nothing for ""; SystemExit when the exporter is not installed."""
    if not endpoint:
        return
    if importlib.util.find_spec("opentelemetry.exporter.otlp.proto.grpc") is None:
        raise SystemExit(
            "SHOAL_OTLP_ENDPOINT is set but the exporter is missing: pip install opentelemetry-exporter-otlp-proto-grpc"
        )
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": f"shoal-{service}", "service.instance.id": instance_id})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    trace.set_tracer_provider(provider)
