"""A receipt shows what is known, and its counts add up."""

import json

from hypothesis import given
from hypothesis import strategies as st

from shoal_gateway.metrics import CATALOGUE, count
from shoal_gateway.ports import Fallback
from shoal_gateway.receipt import PrefillPart, Receipt


def test_unknown_values_are_absent_and_zero_is_not_unknown() -> None:
    fields = json.loads(Receipt("r1", prompt_tokens=5, hit_tokens=0, outcome="finished").to_json())
    assert fields["hit_tokens"] == 0
    assert fields["miss_tokens"] == 5
    assert fields["fallbacks"] == []
    assert not {"matched_tokens", "diverged_at_token", "prefill", "ttft_ms", "error", "stage"} & set(fields)


def test_request_that_failed_names_its_stage() -> None:
    receipt = Receipt("r1", outcome="failed", error="PEER_SILENT", stage="prefill", prefill=PrefillPart(attempts=2))
    receipt.note(Fallback.PREFILL_REPEATED)
    fields = json.loads(receipt.to_json())
    assert fields["stage"] == "prefill"
    assert fields["prefill"] == {"attempts": 2}
    assert fields["fallbacks"] == ["prefill_repeated"]


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_hit_and_miss_are_the_prompt(hit: int, miss: int) -> None:
    receipt = Receipt("r1", prompt_tokens=hit + miss, hit_tokens=hit)
    assert receipt.miss_tokens == miss


def test_settled_request_moves_the_counters_once() -> None:
    before = {name: CATALOGUE.value(name) for name in ("prompt_tokens_total", "hit_tokens_total")}
    finished = CATALOGUE.value("requests_total", outcome="finished")
    resumed = CATALOGUE.value("fallbacks_total", fallback="decode_resumed")
    receipt = Receipt("r1", prompt_tokens=10, hit_tokens=4, completion_tokens=3, outcome="finished", total_ms=5)
    receipt.note(Fallback.DECODE_RESUMED)
    count(receipt)
    assert CATALOGUE.value("requests_total", outcome="finished") == finished + 1
    assert CATALOGUE.value("fallbacks_total", fallback="decode_resumed") == resumed + 1
    assert CATALOGUE.value("prompt_tokens_total") == before["prompt_tokens_total"] + 10
    assert CATALOGUE.value("hit_tokens_total") == before["hit_tokens_total"] + 4
