"""The page of a system: everybody is on it, and what is wrong is said in words."""

from shoal_contracts.errors import Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import kvindex_pb2 as index
from shoal_local.fleet_table import SERVICES, fleet_tables
from shoal_local.fleet_view import FleetView, InstanceView, QueueView
from shoal_local.index_client import Answer, Instance
from shoal_local.terminal import as_text
from shoal_runtime.presence import Load, Served

NOW_S = 1_700_000_000.0


def an_instance(service="decode", **changes):
    given = {
        "service": service,
        "instance_id": f"{service}-1",
        "address": "10.0.0.1:7000",
        "is_ready": True,
        "is_draining": False,
        "reason": "",
        "started_at_s": NOW_S - 300,
        "version": "1",
        "clock_ahead_s": 0.0,
        "model": None,
        "load": None,
    }
    return InstanceView(**(given | changes))


def a_queue(**changes):
    given = {"pool": "p1", "tier": "all", "queued_jobs": 3, "running_jobs": 1, "idle_pulls": 0, "has_consumer": True}
    return QueueView(**(given | changes))


def an_overview(**changes):
    given = {
        "blocks": 1500,
        "shared_bytes": 5 * 2**30,
        "stores": [index.StoreOverview(store_instance_id="node-a", address="10.0.0.1:9000", l1_blocks=1024)],
        "classes": [index.ClassOverview(traffic_class=pb.CHAT, asked_blocks=100, hit_blocks=80)],
        "is_complete": True,
    }
    return Answer(Instance("kvindex-1", "10.0.0.1:7003"), index.OverviewReply(**(given | changes)))


def everybody(**prefill):
    prefill = {"model": Served("tiny", pool="p1", tiers=("all",)), **prefill}
    return [an_instance(service, **(prefill if service == "prefill" else {})) for service in SERVICES]


def page(instances=None, queues=(), overviews=None):
    view = FleetView(
        tuple(everybody() if instances is None else instances),
        queues if queues is None else tuple(queues),
        tuple([an_overview()] if overviews is None else overviews),
    )
    return as_text(fleet_tables(view, NOW_S)).splitlines()


def line_with(lines, *words):
    [found] = [line for line in lines if all(word in line for word in words)]
    return found


def test_the_load_of_a_worker_is_shown():
    lines = page([*everybody(), an_instance(instance_id="decode-2", load=Load(3, 16, 2560, 25_600, 7))])
    assert line_with(lines, "decode-2").split() == [
        "decode-2", "10.0.0.1:7000", "5", "min", "3/16", "7", "2,560", "(10", "%)", "ready",
    ]  # fmt: skip


def test_what_is_wrong_with_an_instance_is_said():
    lines = page(
        [
            *everybody(),
            an_instance(instance_id="decode-2", is_ready=False, reason="the model loads"),
            an_instance(instance_id="decode-3", is_draining=True),
            an_instance(instance_id="decode-4", silent_s=12.0),
            an_instance(instance_id="decode-5", reason="store away"),
        ]
    )
    assert line_with(lines, "decode-2").endswith("not ready: the model loads")
    assert line_with(lines, "decode-3").endswith("draining")
    assert line_with(lines, "decode-4").endswith("SILENT for 12 s")
    assert line_with(lines, "decode-5").endswith("ready; store away")


def test_a_service_without_an_instance_is_named():
    assert "nobody beats for: tokenizer, decode" in page(
        [an_instance(service) for service in SERVICES if service not in ("tokenizer", "decode")]
    )


def test_a_queue_is_shown_with_those_who_serve_it():
    assert line_with(page(queues=[a_queue()]), "p1").split() == ["all", "p1", "3", "1", "1"]


def test_a_queue_that_nobody_serves_is_told():
    lines = page(queues=[a_queue(tier="short"), a_queue(pool="p2"), a_queue(has_consumer=False)])
    assert "decode computes these prompts" in line_with(lines, "short")
    assert "decode computes these prompts" in line_with(lines, "p2")
    assert "lost its consumer" in line_with(lines, "all", "p1")
    silent = page(everybody(silent_s=10.0), queues=[a_queue()])
    assert "decode computes these prompts" in line_with(silent, "p1")


def test_queues_that_cannot_be_seen_are_not_shown_as_empty():
    assert "prefill queues: JetStream does not answer" in page(queues=None)


def test_the_store_is_shown_as_the_lease_holder_tells_it():
    lines = page()
    assert line_with(lines, "hit rate").endswith("80.0 % of 100 blocks asked for")
    assert line_with(lines, "shared level").endswith("5.0 GiB in 1,500 blocks")
    assert line_with(lines, "stores").endswith("1, with 1,024 blocks in DRAM")


def test_a_store_that_is_not_well_is_told():
    lines = page(overviews=[an_overview(stores=[], is_complete=False, reason="a store was away")])
    assert "nothing is stored" in line_with(lines, "stores ")
    assert "a store was away: some hits are missed meanwhile" in line_with(lines, "not complete")


def test_an_index_that_does_not_answer_leaves_the_rest_of_the_page():
    failure = Answer(Instance("kvindex-1", "x"), None, Unavailable(pb.UNAVAILABLE, "is not there"))
    lines = page(overviews=[failure])
    assert "kvindex does not answer: what is stored is not known" in lines
    assert line_with(lines, "decode-1")
