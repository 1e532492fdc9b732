"""Replies as plain values for programs, and addresses without their passwords."""

import json

from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import kvindex_pb2 as index
from shoal_local.index_client import plain
from shoal_local.nats_client import shown_address


def test_numbers_are_numbers_enums_have_names_and_the_unknown_is_none():
    reply = index.OverviewReply(
        blocks=2**60, classes=[index.ClassOverview(traffic_class=pb.AGENT, asked_blocks=3)], sweep=index.SweepOverview()
    )
    told = json.loads(json.dumps(plain(reply)))
    assert told["blocks"] == 2**60
    assert told["shared_capacity_bytes"] is None
    assert told["classes"] == [{"traffic_class": "AGENT", "asked_blocks": 3, "hit_blocks": 0}]
    assert told["sweep"]["last_listing_unix_s"] is None
    assert told["is_complete"] is False


def test_an_enum_of_a_newer_version_stays_a_number():
    assert plain(index.ExplainReply(reason=99))["reason"] == 99


def test_addresses_are_shown_without_user_and_password():
    assert shown_address("nats://me:secret@10.0.0.1:4222") == "nats://10.0.0.1:4222"
    assert shown_address("me:secret@10.0.0.1:4222") == "nats://10.0.0.1:4222"
