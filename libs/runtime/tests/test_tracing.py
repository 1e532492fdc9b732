"""The trace context passes through without any SDK."""

from shoal_runtime import tracing

_PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def test_a_trace_that_came_in_goes_out() -> None:
    out: dict[str, str] = {}
    with tracing.start_span("tokenizer.Encode", tracing.extract(_PARENT)):
        tracing.inject(out)
    assert out["traceparent"].split("-")[1] == "0af7651916cd43dd8448eb211c80319c"


def test_without_a_trace_nothing_is_sent() -> None:
    out: dict[str, str] = {}
    tracing.inject(out)
    assert out == {}
