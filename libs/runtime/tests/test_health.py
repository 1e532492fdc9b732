"""Readiness with its reasons, and the three pages."""

import json

import pytest

from shoal_runtime.health import Health, Message, ops_app
from shoal_runtime.metrics import Catalogue


async def _get(health: Health, catalogue: Catalogue, path: str) -> tuple[int, bytes]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("the pages read no body")

    await ops_app(health, [catalogue])({"type": "http", "path": path}, receive, send)
    return sent[0]["status"], sent[1]["body"]


def test_every_part_that_is_not_fine_is_a_reason() -> None:
    health = Health()
    assert health.is_ready and health.reason == ""
    health.set("postgres", "no answer")
    health.set("nats", "cut off")
    assert not health.is_ready
    assert health.reason == "nats: cut off; postgres: no answer"
    health.set("nats", None)
    health.set("postgres", None)
    assert health.is_ready


async def test_a_change_wakes_who_waits_and_a_repetition_does_not() -> None:
    health = Health()
    changed = health.next_change()
    health.set("nats", None)
    assert not changed.done()
    health.set("nats", "cut off")
    assert changed.done()


@pytest.mark.parametrize(("reason", "status"), [(None, 200), ("cut off", 503)])
async def test_readyz_tells_the_reasons(reason: str | None, status: int) -> None:
    health = Health()
    health.set("nats", reason)
    got, body = await _get(health, Catalogue("x"), "/readyz")
    assert got == status
    assert json.loads(body) == {"is_ready": reason is None, "reasons": {"nats": reason} if reason else {}}


async def test_the_other_pages() -> None:
    catalogue = Catalogue("shoal_test")
    catalogue.counter("jobs_total", "Jobs.", ["outcome"], action="none").labels("done").inc()
    assert (await _get(Health(), catalogue, "/healthz"))[0] == 200
    assert (await _get(Health(), catalogue, "/nothing"))[0] == 404
    status, body = await _get(Health(), catalogue, "/metrics")
    assert status == 200 and b'shoal_test_jobs_total{outcome="done"} 1.0' in body
    assert catalogue.value("jobs_total", outcome="done") == 1
    assert [entry.name for entry in catalogue.entries] == ["shoal_test_jobs_total"]


async def test_a_degraded_part_is_told_and_does_not_stop_work() -> None:
    health = Health()
    health.degrade("postgres", "away")
    assert health.is_ready
    assert health.reason == "postgres: away"
    health.set("postgres", "loading")
    assert not health.is_ready
    health.set("postgres", None)
    assert health.is_ready
    assert health.reason == ""


async def test_what_loads_while_a_process_starts_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    health = Health()
    with caplog.at_level("INFO"):
        health.set("process", "starting")
        health.set("model", "loading")
        health.set("process", None)
        health.set("model", None)
        health.set("model", "lost")
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "INFO", "INFO", "WARNING"]
