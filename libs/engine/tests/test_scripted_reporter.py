"""The reporter says what a real store was seen to say: field names, order, numbering and losses."""

import json
from typing import Any

import httpx

from shoal_engine.scripted import BlockKey, BlockStore, ReporterSettings, SharedMemory, StoreEvent, StoreReporter
from shoal_testkit.clock import VirtualClock

KEY = BlockKey("models/tiny", b"\1" * 32, "tenant")


class Coordinator:
    """Records calls; ``status`` answers events, ``heartbeat_status`` beats."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.status = 200
        self.heartbeat_status = 200
        self.clock = VirtualClock()
        http = httpx.AsyncClient(transport=httpx.MockTransport(self._answer), base_url="http://coordinator")
        settings = ReporterSettings(
            "store-a", "http://coordinator", l1_bytes=4096, l2_bytes=1 << 20, block_bytes=512, max_waiting_events=10
        )
        self.reporter = StoreReporter(settings, self.clock, http)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.calls.append((request.method, request.url.path, body))
        if request.url.path.endswith("/heartbeat"):
            return httpx.Response(self.heartbeat_status, json={})
        if request.method == "DELETE":
            return httpx.Response(204)
        return httpx.Response(self.status, json={})

    def paths(self) -> list[str]:
        return [f"{method} {path}" for method, path, _ in self.calls]

    def batches(self) -> list[dict[str, Any]]:
        return [batch for _, path, body in self.calls if path == "/events" for batch in body["batches"]]


def stored(level: str = "l1") -> StoreEvent:
    return StoreEvent("store", level, [KEY])  # type: ignore[arg-type]


async def test_start_registers_and_tells_capacities() -> None:
    lab = Coordinator()
    await lab.reporter.start(8700)
    _, _, registration = lab.calls[0]
    assert registration["instance_id"] == "store-a"
    assert (registration["ip"], registration["http_port"]) == ("127.0.0.1", 8700)
    assert set(registration) == {"instance_id", "ip", "http_port", "metadata", "p2p_advertised_url", "mq_port"}
    l1, l2 = lab.batches()
    assert (l1["event_type"], l1["tier"], l1["backend"], l1["capacity_bytes"], l1["seq"]) == (
        "config",
        "l1",
        "dram",
        4096,
        1,
    )
    assert (l2["event_type"], l2["tier"], l2["backend"], l2["shared"], l2["seq"]) == ("config", "l2", "fs", True, 2)
    assert l2["capacity_bytes"] == 1 << 20
    await lab.reporter.stop()
    assert lab.paths()[-1] == "DELETE /instances/store-a"


async def test_one_flush_carries_batches_in_order() -> None:
    lab = Coordinator()
    await lab.reporter.start(8700)
    store = BlockStore(SharedMemory(), listener=lab.reporter.listen)
    store.store([KEY])
    store.load([KEY])
    await lab.clock.advance(1)
    batches = lab.batches()[2:]
    assert [(b["seq"], b["event_type"], b["tier"], b["backend"]) for b in batches] == [
        (3, "store", "l1", "dram"),
        (4, "store", "l2", "fs"),
        (5, "access", "l1", ""),
    ]
    assert lab.paths().count("POST /events") == 2
    [entry] = batches[0]["entries"]
    assert entry == {
        "key": {
            "chunk_hash_hex": "01" * 32,
            "model_name": "models/tiny",
            "kv_rank": 16777472,
            "object_group_id": 0,
            "cache_salt": "tenant",
        },
        "size_bytes": 512,
        "token_ids": [],
        "token_offset": -1,
    }
    assert {b["incarnation"] for b in lab.batches()} == {int(VirtualClock().now())}
    await lab.reporter.stop()


async def test_failed_batches_are_lost_and_leave_a_gap() -> None:
    lab = Coordinator()
    await lab.reporter.start(8700)
    lab.status = 500
    lab.reporter.listen(stored())
    await lab.clock.advance(1)
    lab.status = 200
    lab.reporter.listen(stored("l2"))
    await lab.clock.advance(1)
    assert lab.reporter.lost_batches == 1
    assert [batch["seq"] for batch in lab.batches()] == [1, 2, 3, 4]
    assert lab.batches()[-1]["tier"] == "l2"
    await lab.reporter.stop()


async def test_unknown_to_the_coordinator_registers_at_the_next_beat_and_numbers_go_on() -> None:
    lab = Coordinator()
    await lab.reporter.start(8700)
    await lab.clock.advance(5)
    assert lab.paths()[-1] == "PUT /instances/store-a/heartbeat"
    lab.heartbeat_status = 404
    await lab.clock.advance(5)
    assert lab.paths().count("POST /instances") == 1
    await lab.clock.advance(5)
    assert lab.paths().count("POST /instances") == 2
    assert [batch["seq"] for batch in lab.batches()] == [1, 2, 3, 4]
    await lab.reporter.stop()


async def test_absent_coordinator_does_not_stop_the_store_and_is_found_later() -> None:
    lab = Coordinator()
    lab.status = 503
    await lab.reporter.start(8700)
    lab.status = 200
    await lab.clock.advance(5)
    assert lab.paths().count("POST /instances") == 2
    assert [batch["event_type"] for batch in lab.batches()] == ["config", "config"]
    await lab.reporter.stop()
    await lab.reporter.stop()


async def test_events_over_the_bound_are_dropped_without_a_number() -> None:
    lab = Coordinator()
    for _ in range(10 + 5):
        lab.reporter.listen(stored())
    assert lab.reporter.dropped_events == 5
    await lab.reporter.start(8700)
    await lab.reporter.flush()
    assert len(lab.batches()) == 10 + 2
    await lab.reporter.stop()
