"""What one beat says, and which beats count."""

from types import SimpleNamespace

import pytest

from shoal_contracts.v1 import fleet_pb2
from shoal_local.fleet_view import FORGET_AFTER_S, FleetWatch, instance_view


def a_beat(**changes):
    given = {
        "instance_id": "decode-1",
        "incarnation": 1_700_000_000_000,
        "role": fleet_pb2.DECODE,
        "address": "10.0.0.1:7000",
        "is_ready": True,
        "load": fleet_pb2.WorkerLoad(running_requests=2, max_running_requests=16, cached_tokens=300),
    }
    return fleet_pb2.Beat(**(given | changes))


def a_view(beat, **changes):
    return instance_view(beat, **({"heard_at_unix_s": 1_700_000_060.0, "silent_s": 0.2} | changes))


async def seen(*beats):
    """What a watch has after these; it needs no connection for that."""
    watch = FleetWatch(None)
    for beat in beats:
        await watch.on_beat(SimpleNamespace(data=beat if isinstance(beat, bytes) else beat.SerializeToString()))
    return {view.instance_id: view for view in watch.instances()}


def test_a_beat_is_read_whole():
    view = a_view(a_beat(version="1.2", sent_at_unix_ms=1_700_000_061_000))
    assert (view.service, view.address, view.started_at_s) == ("decode", "10.0.0.1:7000", 1_700_000_000.0)
    assert (view.load.running_requests, view.load.cached_tokens) == (2, 300)
    assert (view.version, view.clock_ahead_s) == ("1.2", 1.0)
    assert not view.is_silent


def test_what_an_older_instance_does_not_tell_is_unknown():
    view = a_view(fleet_pb2.Beat(instance_id="gateway-1", role=fleet_pb2.GATEWAY))
    assert (view.load, view.model, view.version, view.clock_ahead_s) == (None, None, "", None)


def test_a_role_of_a_newer_version_is_shown_too():
    beat = a_beat()
    newer = fleet_pb2.Beat.FromString(beat.SerializeToString())
    newer.role = 99
    assert a_view(newer).service == "role_unspecified"


@pytest.mark.parametrize(("silent_s", "is_silent"), [(2.9, False), (3.1, True)])
def test_an_instance_is_silent_when_others_take_it_for_gone(silent_s, is_silent):
    assert a_view(a_beat(), silent_s=silent_s).is_silent is is_silent


async def test_the_beat_of_an_older_incarnation_is_fenced():
    views = await seen(a_beat(incarnation=5000, address="new"), a_beat(incarnation=4000, address="old"))
    assert views["decode-1"].address == "new"


async def test_what_does_not_parse_is_dropped():
    assert list(await seen(b"\xff\xff\xff", a_beat())) == ["decode-1"]


async def test_instances_stand_in_the_order_of_the_river():
    views = await seen(
        a_beat(), a_beat(instance_id="gateway-1", role=fleet_pb2.GATEWAY), a_beat(instance_id="decode-0")
    )
    assert list(views) == ["gateway-1", "decode-0", "decode-1"]


async def test_who_was_silent_for_long_is_forgotten():
    watch = FleetWatch(None)
    await watch.on_beat(SimpleNamespace(data=a_beat().SerializeToString()))
    [view] = watch.instances()
    assert watch.instances(later_s=FORGET_AFTER_S - 1)[0].is_silent
    assert (view.instance_id, watch.instances(later_s=FORGET_AFTER_S + 1)) == ("decode-1", [])
