"""The form of a log line."""

import json
import logging

import pytest

from shoal_runtime import logs


@pytest.fixture
def lines() -> list[dict[str, object]]:
    return []


@pytest.fixture(autouse=True)
def captured(lines: list[dict[str, object]], request: pytest.FixtureRequest) -> None:
    class _Capture(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(self.format(record)))

    handler = _Capture()
    handler.setFormatter(logs.JsonFormatter("gateway", "gateway-1"))
    logger = logging.getLogger("shoal_test")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    request.addfinalizer(lambda: logger.removeHandler(handler))


def test_an_event_and_its_keys_are_one_line(lines: list[dict[str, object]]) -> None:
    logs.get_logger("shoal_test").info("request.settled", outcome="finished", hit_tokens=128)
    [line] = lines
    assert line["event"] == "request.settled"
    assert (line["outcome"], line["hit_tokens"], line["service"], line["level"]) == ("finished", 128, "gateway", "INFO")


def test_bound_context_stands_in_every_line_inside_and_none_outside(lines: list[dict[str, object]]) -> None:
    log = logs.get_logger("shoal_test")
    with logs.bind_context(request_id="r1"), logs.bind_context(tenant="t"):
        log.info("inner.said")
    log.info("outer.said")
    assert (lines[0]["request_id"], lines[0]["tenant"]) == ("r1", "t")
    assert "request_id" not in lines[1]


def test_secrets_are_masked_by_their_name(lines: list[dict[str, object]]) -> None:
    logs.get_logger("shoal_test").info("key.read", api_key="sk-1", Authorization="Bearer x", key_id="k1")
    assert (lines[0]["api_key"], lines[0]["Authorization"], lines[0]["key_id"]) == ("***", "***", "k1")


@pytest.mark.logs_error("thing.failed")
def test_a_traceback_comes_along(lines: list[dict[str, object]]) -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        logs.get_logger("shoal_test").error("thing.failed", exc_info=error)
    assert "ValueError: no" in str(lines[0]["traceback"])


def test_lines_of_libraries_have_the_same_form(lines: list[dict[str, object]]) -> None:
    logging.getLogger("shoal_test.library").warning("careful %d", 3)
    assert (lines[0]["event"], lines[0]["message"]) == ("log", "careful 3")
