"""Requests made from the OpenAPI document, right and wrong ones: an answer or a clear refusal, soon, in whole JSON."""

from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, settings

from shoal_testkit.cluster import Cluster
from shoal_testkit.grammars import check_stream

from .conftest import MODEL

DOCUMENT = Path(__file__).parents[2] / "docs/reference/openapi.json"
WITHIN_S = 30.0
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MOST_TOKENS = 16
MOST_EVENTS = 10_000
EXAMPLES = 60
REFUSALS = (
    httpx.codes.BAD_REQUEST,
    httpx.codes.NOT_FOUND,
    httpx.codes.METHOD_NOT_ALLOWED,
    httpx.codes.UNSUPPORTED_MEDIA_TYPE,
)

api = schemathesis.openapi.from_path(DOCUMENT)
api.config.max_stream_events = MOST_EVENTS  # it would leave before the end otherwise


def _served(body: Any) -> Any:
    """The same for a model that is there, and no longer an answer than a test has time for."""
    if not isinstance(body, dict):
        return body
    limit = "max_output_tokens" if "input" in body else "max_tokens"
    shorter = {limit: MOST_TOKENS} if all(body.get(name) is None for name in LIMITS) else {}
    shorter |= {name: MOST_TOKENS for name in LIMITS if isinstance(body.get(name), int) and body[name] > MOST_TOKENS}
    name = {"model": MODEL} if isinstance(body.get("model"), str) else {}
    return {**body, **name, **shorter}


@api.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_request_is_answered_or_refused_in_words(case: Any, deepseek: Cluster) -> None:
    case.body = _served(case.body)
    answer = case.call(base_url=deepseek.url, timeout=WITHIN_S)
    path = case.operation.path
    if answer.status_code == httpx.codes.OK:
        if answer.headers["content-type"][0].startswith("text/event-stream"):
            check_stream(path, answer.content)
        else:
            assert isinstance(answer.json(), dict)
        return
    assert answer.status_code in REFUSALS, (answer.status_code, answer.content[:500])
    told = answer.json()
    assert told["error"]["message"] and (told.get("type") == "error" or {"type", "param", "code"} <= set(told["error"]))
