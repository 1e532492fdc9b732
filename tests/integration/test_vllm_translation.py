"""Requests and outputs across the border to vLLM's own types; here because importing vLLM takes ten seconds."""

from dataclasses import replace

import pytest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from shoal_engine.api import EngineFailed, EngineRequest, FinishReason, Item, RequestRefused, Sampling
from shoal_engine.vllm import translation
from shoal_engine.vllm.translation import ModelFacts

pytestmark = pytest.mark.engine

FACTS = ModelFacts(
    vocabulary_tokens=1000,
    max_context_tokens=64,
    eos_token_ids=(2, 3),
    sampling_defaults={"temperature": 0.6, "top_k": 40},
)
REQUEST = EngineRequest("r", (5, 6, 7))


def an_output(
    token_ids: list[int], finish: str | None = None, logprobs: list[dict[int, float]] | None = None
) -> RequestOutput:
    told = [{token: Logprob(value) for token, value in position.items()} for position in logprobs or ()]
    completion = CompletionOutput(
        index=0, text="", token_ids=token_ids, cumulative_logprob=None, logprobs=told or None, finish_reason=finish
    )
    return RequestOutput("r", None, [5, 6, 7], None, [completion], finish is not None, num_cached_tokens=2)


@pytest.mark.parametrize(
    "refused",
    [
        replace(REQUEST, token_ids=()),
        replace(REQUEST, token_ids=[1] * 64),
        replace(REQUEST, token_ids=[1] * 60, resumed_token_ids=[1] * 4),
        replace(REQUEST, token_ids=[1000]),
        replace(REQUEST, token_ids=[-1]),
        replace(REQUEST, resumed_token_ids=[5000]),
        replace(REQUEST, cache_salt="a/b"),
        replace(REQUEST, cache_salt="a" * 129),
        replace(REQUEST, items=(Item(0, 2, "image"),)),
    ],
)
def test_what_could_harm_the_engine_is_refused(refused: EngineRequest) -> None:
    with pytest.raises(RequestRefused):
        translation.check_request(refused, FACTS)


def test_what_fits_is_not_refused() -> None:
    translation.check_request(replace(REQUEST, token_ids=[0, 999] * 31, cache_salt="tenant-1"), FACTS)


@pytest.mark.parametrize(
    ("max_tokens", "resumed", "remaining"),
    [(None, 0, 61), (None, 10, 51), (8, 0, 8), (8, 3, 5), (8, 8, 0), (900, 1, 60)],
)
def test_remaining_tokens(max_tokens: int | None, resumed: int, remaining: int) -> None:
    request = replace(REQUEST, sampling=Sampling(max_tokens=max_tokens), resumed_token_ids=[9] * resumed)
    assert translation.remaining_tokens(request, FACTS) == remaining


def test_resumed_tokens_extend_the_prompt() -> None:
    prompt = translation.to_prompt(replace(REQUEST, resumed_token_ids=(8, 9), cache_salt="s"))
    assert prompt["prompt_token_ids"] == [5, 6, 7, 8, 9]
    assert prompt["cache_salt"] == "s"


def test_model_defaults_hold_until_the_request_says_otherwise() -> None:
    params = translation.to_sampling_params(Sampling(temperature=0.0, seed=4, logit_bias={7: 1.5}), 8, FACTS)
    assert (params.temperature, params.seed, params.max_tokens) == (0.0, 4, 8)
    assert params.logit_bias == {7: 1.5}
    assert translation.to_sampling_params(Sampling(), 8, FACTS).temperature == 0.6
    asked = Sampling(seed=4, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={7: 1.5, 9: 1.0})
    resumed = translation.to_sampling_params(asked, 8, FACTS, [7, 8, 7])
    assert resumed.logit_bias == {7: 0.5, 8: -0.75, 9: 1.0} and resumed.seed == 7
    assert translation.to_sampling_params(Sampling(top_k=3), 8, FACTS).top_k == 3


def test_end_of_sequence_is_a_stop_token_unless_ignored() -> None:
    assert translation.to_sampling_params(Sampling(stop_token_ids=(9,)), 8, FACTS).stop_token_ids == [2, 3, 9]
    assert translation.to_sampling_params(Sampling(ignore_eos=True), 8, FACTS).stop_token_ids == []


def test_stop_token_leaves_the_answer() -> None:
    output = an_output([11, 2], "stop", [{11: -0.5, 12: -1.0}, {2: -0.1, 3: -4.0}])
    step = translation.to_step(output, is_first=True, alternatives=1)
    assert (step.token_ids, step.finish, step.stop_token_id, step.hit_tokens) == ([11], FinishReason.STOP, 2, 2)
    assert step.logprobs is not None
    assert [told.top for told in step.logprobs] == [((11, -0.5),)]


def test_chosen_token_is_told_beside_better_ones() -> None:
    output = an_output([13], None, [{13: -3.0, 11: -0.5, 12: -1.0}])
    step = translation.to_step(output, is_first=False, alternatives=2)
    assert step.logprobs is not None
    assert (step.logprobs[0].logprob, step.logprobs[0].top) == (-3.0, ((11, -0.5), (12, -1.0)))
    assert (step.hit_tokens, step.finish) == (None, None)


def test_abort_is_a_cancel_and_anything_unknown_a_failure() -> None:
    assert translation.to_step(an_output([], "abort"), is_first=True, alternatives=None).finish is FinishReason.CANCEL
    with pytest.raises(EngineFailed):
        translation.to_step(an_output([], "error"), is_first=True, alternatives=None)
