"""Every reason for a miss is a sentence with its numbers, and says what to do."""

import pytest

from shoal_contracts.v1 import kvindex_pb2 as index
from shoal_local.explanation import MEANINGS, explain, render

ASKED_AT_S = 1_700_000_000
REASONS = [number for number in index.MissReason.values() if number != index.MISS_REASON_UNSPECIFIED]


def a_reply(reason, **changes):
    given = {
        "whole_blocks": 15,
        "hit_blocks": 12,
        "now_hit_blocks": 12,
        "reason": reason,
        "block_tokens": 128,
        "pool": "pool-a",
        "asked_at_unix_s": ASKED_AT_S,
    }
    return index.ExplainReply(**(given | changes))


def test_every_reason_has_its_words():
    assert set(MEANINGS) == set(REASONS)


@pytest.mark.parametrize("reason", [r for r in REASONS if r not in (index.NO_MISS, index.DIVERGED)])
def test_the_first_missing_block_is_named_with_its_tokens(reason):
    assert explain(a_reply(reason)).cause.startswith("Block 12 (tokens 1,536-1,663) ")


def test_without_a_known_layout_blocks_have_no_tokens():
    words = explain(a_reply(index.NEVER_STORED, block_tokens=0))
    assert words.cause == "Block 12 was never stored, as far as this index remembers."
    assert words.found == "12 of 15 whole blocks were hit."


@pytest.mark.parametrize(("gone_at_s", "beside"), [(ASKED_AT_S - 7200, "2 h before"), (ASKED_AT_S + 60, "1 min after")])
def test_when_it_was_gone_is_told_beside_the_request(gone_at_s, beside):
    assert explain(a_reply(index.EXPIRED, gone_at_unix_s=gone_at_s)).cause.endswith(f", {beside} the request.")


def test_a_prompt_that_parts_from_another_is_told_to_the_block():
    told = a_reply(index.DIVERGED, nearest_request_id="req-x", first_other_block=12)
    equal = "The prompt is equal to that of request req-x for 12 blocks"
    assert explain(told).cause == f"{equal}, and differs from it somewhere in tokens 1,536-1,663."
    told.first_other_block = 0
    assert explain(told).cause == "The prompt differs from that of request req-x already somewhere in tokens 0-127."


def test_what_it_would_hit_now_is_told():
    assert (
        explain(a_reply(index.NEVER_STORED, now_hit_blocks=15)).now == "Asked again now, it would hit 15 of 15 blocks."
    )
    assert explain(a_reply(index.NEVER_STORED)).now == "Asked again now, it would hit as much."
    assert explain(a_reply(index.NO_MISS)).now == ""


def test_a_reason_of_a_newer_version_is_not_hidden():
    words = explain(a_reply(99))
    assert "(99)" in words.cause
    assert "version" in words.advice


def test_a_whole_hit_tells_where_a_loss_behind_it_shows():
    words = explain(a_reply(index.NO_MISS, hit_blocks=15, now_hit_blocks=15))
    assert words.cause.startswith("The index promised all of them")
    assert "hit_lost" in words.advice


def test_a_prompt_that_is_new_from_its_first_token_is_told_as_such():
    assert explain(a_reply(index.NEVER_STORED, hit_blocks=0)).advice.startswith(
        "Most likely the beginning of the prompt is new"
    )
    assert "beginning" not in explain(a_reply(index.NEVER_STORED)).advice


def test_an_edited_history_is_looked_up_in_the_receipt():
    assert "diverged_at_token" in explain(a_reply(index.DIVERGED)).advice


def test_a_prompt_below_one_block_is_told_as_such():
    told = a_reply(index.NO_MISS, whole_blocks=0, hit_blocks=0, now_hit_blocks=0)
    assert explain(told).found == "Its prompt is shorter than one block: nothing of it can be hit."
    assert explain(told).cause.startswith("The index promised nothing")


@pytest.mark.parametrize("reason", REASONS)
def test_it_fits_a_terminal_and_names_the_request(reason):
    text = render("req-1", "kvindex-1", a_reply(reason, gone_at_unix_s=ASKED_AT_S - 1), ASKED_AT_S + 5)
    assert max(map(len, text.splitlines())) <= 80
    assert "req-1" in text
    assert "5 s ago, by kvindex-1" in text
