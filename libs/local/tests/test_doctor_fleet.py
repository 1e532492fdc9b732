"""What a system says about itself is judged: who is missing, who differs, what nobody takes, what is not found."""

from dataclasses import replace

import pytest

from shoal_contracts.errors import Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import kvindex_pb2 as index
from shoal_local.doctor.findings import Verdict
from shoal_local.doctor.fleet import check_clocks, check_instances, check_pools, check_queues, check_versions
from shoal_local.doctor.index import check_addresses, check_index, check_stores, objects_not_written
from shoal_local.fleet_view import FleetView, InstanceView, QueueView
from shoal_local.index_client import Answer, Instance
from shoal_runtime.presence import Served

POOL = "pool-1"
VERSION = "1.0.abc"


def an_instance(service, **changes):
    model = Served("tiny", POOL if service in ("prefill", "decode") else "", 128, 8192, ("all",))
    given = {
        "service": service,
        "instance_id": f"{service}-1",
        "address": "",
        "is_ready": True,
        "is_draining": False,
        "reason": "",
        "started_at_s": 0.0,
        "version": VERSION,
        "clock_ahead_s": -0.01,
        "model": model if service in ("tokenizer", "prefill", "decode") else None,
        "load": None,
    }
    return InstanceView(**(given | changes))


def a_view(*instances, queues=(), overviews=()):
    services = ("gateway", "tokenizer", "kvindex", "prefill", "decode")
    return FleetView(instances or tuple(an_instance(one) for one in services), queues, tuple(overviews))


def a_queue(**changes):
    return replace(QueueView(POOL, "all", 3, 1, 1, has_consumer=True), **changes)


def an_answer(reason="", **changes):
    given = {"lease_holder": "kvindex-1", "is_complete": True, "blocks": 4}
    return Answer(Instance("kvindex-1", "127.0.0.1:1", reason), index.OverviewReply(**(given | changes)))


def verdicts(findings):
    return {finding.name: finding.verdict for finding in findings}


def test_a_whole_fleet_is_right():
    view = a_view(queues=(a_queue(),))
    findings = [*check_instances(view), check_versions(view, VERSION), check_clocks(view)]
    findings += [*check_pools(view), *check_queues(view)]
    assert set(verdicts(findings).values()) == {Verdict.OK}


def test_a_service_of_which_nobody_is_heard_is_wrong():
    found = verdicts(check_instances(a_view(an_instance("decode"))))
    assert found["decode instances"] is Verdict.OK
    assert {found[f"{name} instances"] for name in ("gateway", "tokenizer", "kvindex", "prefill")} == {Verdict.WRONG}


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({"is_ready": False, "reason": "engine: out of memory"}, Verdict.WRONG, "decode-1: engine: out of memory"),
        ({"is_draining": True}, Verdict.WRONG, "decode-1: leaving"),
        ({"silent_s": 4.0}, Verdict.WRONG, "decode-1: silent for 4 s"),
        ({"reason": "store: away"}, Verdict.WARNING, "with trouble. decode-1: store: away"),
    ],
)
def test_what_is_against_an_instance_is_told(changes, verdict, words):
    (finding,) = [f for f in check_instances(a_view(an_instance("decode", **changes))) if f.name == "decode instances"]
    assert finding.verdict is verdict
    assert words in finding.found


def test_one_of_two_that_is_not_ready_is_a_warning():
    view = a_view(an_instance("decode"), an_instance("decode", instance_id="decode-2", is_ready=False))
    (finding,) = [f for f in check_instances(view) if f.name == "decode instances"]
    assert finding.verdict is Verdict.WARNING
    assert "1 of 2 ready. decode-2: not ready, and does not say why" in finding.found


def test_versions_that_differ_are_wrong_and_another_program_is_a_warning():
    view = a_view(an_instance("decode"), an_instance("prefill", version="0.9"))
    finding = check_versions(view, VERSION)
    assert finding.verdict is Verdict.WRONG
    assert f"0.9 is prefill-1; {VERSION} is decode-1" in finding.found
    assert check_versions(a_view(), "2.0").verdict is Verdict.WARNING
    assert check_versions(FleetView((), (), ()), VERSION).verdict is Verdict.UNKNOWN
    assert "tells no version" in check_versions(a_view(an_instance("decode", version="")), VERSION).found


@pytest.mark.parametrize(
    ("ahead_s", "verdict", "words"),
    [
        (1.0, Verdict.OK, "agree"),
        (-12.0, Verdict.WARNING, "decode-1 is 12 s behind"),
        (3600.0, Verdict.WRONG, "decode-1 is 1 h ahead"),
        (None, Verdict.UNKNOWN, "no instance tells"),
    ],
)
def test_clocks_are_compared_with_this_machine(ahead_s, verdict, words):
    finding = check_clocks(a_view(an_instance("decode", clock_ahead_s=ahead_s)))
    assert (finding.verdict, words in finding.found) == (verdict, True)


def test_when_all_clocks_differ_it_may_be_ours():
    assert "this machine's clock" in check_clocks(a_view(an_instance("decode", clock_ahead_s=60.0))).found
    both = a_view(an_instance("decode", clock_ahead_s=60.0), an_instance("prefill"))
    assert "this machine's clock" not in check_clocks(both).found


def test_pools_that_do_not_meet_are_told_from_both_sides():
    other = Served("tiny", "pool-2", 128, 8192, ("all",))
    view = a_view(an_instance("tokenizer"), an_instance("prefill", model=other), an_instance("decode"))
    findings = check_pools(view)
    assert [finding.verdict for finding in findings] == [Verdict.WRONG, Verdict.WRONG]
    assert "prefill (prefill-1) is for the same model, but in another pool than decode's pool-1" in findings[0].found
    assert "pool pool-2 has prefill (prefill-1) and no decode worker" in findings[1].found


def test_a_pool_needs_a_prefill_worker_and_a_tokenizer():
    assert "no prefill worker" in check_pools(a_view(an_instance("tokenizer"), an_instance("decode")))[0].found
    huge = an_instance("tokenizer", model=Served("huge"))
    (finding,) = check_pools(a_view(huge, an_instance("prefill"), an_instance("decode")))
    assert "no tokenizer serves tiny; they serve huge" in finding.found
    assert check_pools(a_view(an_instance("kvindex")))[0].verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("stranded", [{"tier": "long"}, {"pool": "pool-2"}, {"has_consumer": False}])
def test_jobs_that_no_ready_worker_takes_are_told(stranded):
    (finding,) = check_queues(a_view(queues=(a_queue(), a_queue(**stranded))))
    assert finding.verdict is Verdict.WRONG
    assert "3 jobs in pool" in finding.found


def test_empty_queues_need_nobody_and_unknown_ones_are_not_fine():
    assert check_queues(a_view(queues=(a_queue(tier="long", queued_jobs=0),)))[0].verdict is Verdict.OK
    assert check_queues(a_view(queues=None))[0].verdict is Verdict.UNKNOWN


def test_an_index_that_does_not_answer_is_wrong_with_its_reason():
    failure = Unavailable(pb.UNAVAILABLE, "is loading")
    silent = Answer(Instance("kvindex-1", "127.0.0.1:1", "directory: Postgres cannot be read"), None, failure)
    complete, postgres = check_index([silent])
    assert (complete.verdict, postgres.verdict) == (Verdict.WRONG, Verdict.UNKNOWN)
    assert "directory: Postgres cannot be read" in complete.found


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (an_answer(), ["ok", "ok"]),
        (an_answer(is_complete=False, reason="store a cannot be listed"), ["warning", "ok"]),
        (an_answer("listing: x; postgres: away (OSError); changes wait in memory"), ["ok", "wrong"]),
        (an_answer(lease_holder=""), ["ok", "wrong"]),
    ],
)
def test_an_index_tells_whether_it_is_complete_and_written(answer, expected):
    assert [finding.verdict.value for finding in check_index([answer])] == expected


async def test_without_stores_nothing_is_found():
    assert [finding.verdict for finding in await check_stores([an_answer()])] == [Verdict.WRONG]
    assert [finding.verdict for finding in await check_stores([])] == [Verdict.UNKNOWN]


async def test_without_addresses_nothing_was_called():
    assert (await check_addresses(a_view())).verdict is Verdict.UNKNOWN


def test_objects_that_a_store_could_not_write_are_counted_by_why():
    text = (
        "# TYPE shoal_store_stored_objects counter\n"
        'shoal_store_stored_objects_total{outcome="stored"} 9.0\n'
        'shoal_store_stored_objects_total{outcome="full"} 2.0\n'
        'shoal_store_stored_objects_total{outcome="failed"} 0.0\n'
    )
    assert objects_not_written(text) == {"full": 2}
