from types import SimpleNamespace

import pytest

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1.common_pb2 import MODEL_NOT_FOUND, UNSUPPORTED
from shoal_tokenizer.codec.api import Sampling
from shoal_tokenizer.codec.requests.fields import HONOURED, FieldTable, ignored, refuse_fields, refused
from shoal_tokenizer.codec.requests.served_model import ServedModel

MODEL = ServedModel("tiny", Sampling(temperature=0.6, top_k=20, stop_token_ids=[1, 2]), 100)


def test_what_was_asked_for_lies_over_the_models_defaults() -> None:
    assert MODEL.sampling() == Sampling(temperature=0.6, top_k=20, stop_token_ids=[1, 2])
    asked = MODEL.sampling(temperature=0, max_tokens=5, top_k=None, logit_bias={"7": -100})
    assert asked == Sampling(temperature=0, top_k=20, max_tokens=5, stop_token_ids=[1, 2], logit_bias={7: -100})


def test_defaults_are_not_shared_between_requests() -> None:
    MODEL.sampling().stop_token_ids.append(9)
    assert MODEL.sampling().stop_token_ids == [1, 2]


def test_ignoring_the_end_means_no_stop_tokens() -> None:
    sampling = MODEL.sampling(ignores_eos=True)
    assert sampling.ignore_eos and sampling.stop_token_ids == []


def test_a_negative_seed_is_a_seed_of_its_own() -> None:
    seeds = {MODEL.sampling(seed=seed).seed for seed in (-1, 0, 1, -(2**63))}
    assert len(seeds) >= 3 and all(seed is not None and 0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("key", ["100", "-1", "x", "", "1" * 5000, "٣"])
def test_a_bias_for_no_token_is_refused(key: str) -> None:
    with pytest.raises(BadRequest, match="from 0 to 99"):
        MODEL.sampling(logit_bias={key: 1})


def test_another_model_is_not_found() -> None:
    with pytest.raises(BadRequest, match="'tiny'") as refusal:
        MODEL.check_name("x" * 10_000)
    assert refusal.value.code == MODEL_NOT_FOUND and len(refusal.value.message) < 400


def test_the_table_refuses_by_name_and_with_its_words() -> None:
    table: FieldTable = {"a": HONOURED, "b": ignored("why"), "c": refused("Use 'a'."), "a[].c": refused()}
    refuse_fields(SimpleNamespace(a=1, b=2, c=None), table)
    with pytest.raises(BadRequest, match=r"'c' is not supported here. Use 'a'.") as refusal:
        refuse_fields(SimpleNamespace(a=1, c=0), table)
    assert (refusal.value.code, refusal.value.param) == (UNSUPPORTED, "c")
