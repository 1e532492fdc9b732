"""A receipt shows what is known, and its counts add up."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_gateway.accounts import BrokenAccount, broken_accounts
from shoal_gateway.history import AnswerHistory
from shoal_gateway.metrics import CATALOGUE, count
from shoal_gateway.ports import Fallback
from shoal_gateway.receipt import PrefillPart, Receipt
from shoal_gateway.request import BlockClaim
from shoal_gateway.steps.settle import SettleStep


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


@pytest.mark.parametrize(
    ("changed", "rules"),
    [
        ({}, []),
        ({"hit_tokens": 11}, [BrokenAccount.MORE_HIT_THAN_ASKED]),
        ({"hit_tokens": -1}, [BrokenAccount.MORE_HIT_THAN_ASKED]),
        ({"tokens_not_shown": 1}, [BrokenAccount.TOKENS_NOT_SHOWN]),
        ({"tokens_not_shown": -1}, [BrokenAccount.TOKENS_NOT_SHOWN]),
        ({"completion_tokens": None}, [BrokenAccount.UNCOUNTED]),
        ({"hit_tokens": None}, [BrokenAccount.UNCOUNTED]),
        ({"hit_tokens": None, "outcome": "failed"}, []),
        ({"is_settled": True}, [BrokenAccount.SETTLED_TWICE]),
    ],
)
def test_accounts_that_do_not_add_up_are_named(changed: dict[str, Any], rules: list[BrokenAccount]) -> None:
    whole = {"prompt_tokens": 10, "hit_tokens": 4, "completion_tokens": 3, "outcome": "finished"}
    assert list(broken_accounts(Receipt("r1", **{**whole, **changed}))) == rules


class NoIndex:
    def settle(self, claim: BlockClaim) -> None: ...


@pytest.mark.logs_error("request.accounts_broken")
def test_request_that_is_settled_twice_is_counted_once_and_told() -> None:
    settled: list[Receipt] = []
    step = SettleStep(NoIndex(), AnswerHistory(0), settled.append)  # type: ignore[arg-type]
    receipt = Receipt("r1", prompt_tokens=10, hit_tokens=4, completion_tokens=3, outcome="finished")
    before = CATALOGUE.value("broken_accounts_total", rule="settled_twice")
    step.record(receipt)
    assert CATALOGUE.value("broken_accounts_total", rule="settled_twice") == before
    step.record(receipt)
    assert settled == [receipt]
    assert CATALOGUE.value("broken_accounts_total", rule="settled_twice") == before + 1
