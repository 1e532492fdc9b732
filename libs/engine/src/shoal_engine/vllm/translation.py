"""Between the dataclasses of ``shoal_engine.api`` and vLLM's request and output types. Pure, and strict on entry.

vLLM checks token ids only where it has a tokenizer, which this engine does not load; an id outside the vocabulary
would kill the engine for everyone. So everything about one request that could do harm is refused here.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.inputs import TokensInput, tokens_input
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from shoal_engine.api import (
    EngineFailed,
    EngineRequest,
    FinishReason,
    RequestRefused,
    Sampling,
    Step,
    TokenLogprobs,
    check_constraint,
)

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.CANCEL}
_MAX_SALT_CHARACTERS = 128
_SALT_FORBIDDEN = frozenset("@/\\\0")  # LMCache builds file names from it


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a request is checked and completed with."""

    vocabulary_tokens: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float]  # of the model's own generation_config.json


def check_request(request: EngineRequest, facts: ModelFacts) -> None:
    """Raises RequestRefused for what can never run."""
    check_constraint(request)
    if request.items:
        raise RequestRefused("this engine takes text only")
    if not request.token_ids:
        raise RequestRefused("the prompt is empty")
    prompt_tokens = len(request.token_ids) + len(request.resumed_token_ids)
    if prompt_tokens >= facts.max_context_tokens:
        raise RequestRefused(
            f"the prompt has {prompt_tokens} tokens; with at least one token of answer "
            f"it must fit into a context of {facts.max_context_tokens}"
        )
    for token_ids in (request.token_ids, request.resumed_token_ids):
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= facts.vocabulary_tokens):
            raise RequestRefused(f"token ids must be from 0 to {facts.vocabulary_tokens - 1}")
    salt = request.cache_salt
    if len(salt) > _MAX_SALT_CHARACTERS or not _SALT_FORBIDDEN.isdisjoint(salt):
        raise RequestRefused("the cache salt is too long or holds one of @ / \\")


def to_prompt(request: EngineRequest) -> TokensInput:
    """Resumed tokens are prompt to vLLM: the store is asked for them too."""
    return tokens_input([*request.token_ids, *request.resumed_token_ids], cache_salt=request.cache_salt or None)


def remaining_tokens(request: EngineRequest, facts: ModelFacts) -> int:
    """How many tokens may still be generated; 0 when a resumed answer is complete already."""
    room = facts.max_context_tokens - len(request.token_ids) - len(request.resumed_token_ids)
    if request.sampling.max_tokens is None:
        return room
    return max(0, min(room, request.sampling.max_tokens - len(request.resumed_token_ids)))


def to_sampling_params(
    sampling: Sampling, max_tokens: int, facts: ModelFacts, resumed_token_ids: Sequence[int] = ()
) -> SamplingParams:
    """Raises a VLLMClientError or ValueError for values that vLLM does not take."""
    chosen: dict[str, Any] = dict(facts.sampling_defaults)
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ):
        if (value := getattr(sampling, name)) is not None:
            chosen[name] = value
    if resumed_token_ids and "seed" in chosen:
        # The same one would draw what it drew for the first tokens again.
        chosen["seed"] = (chosen["seed"] + len(resumed_token_ids)) % 2**63
    # The end of the answer is made of stop tokens alone, so that the one that ended it is always told.
    constraint = sampling.constraint
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(facts.eos_token_ids))
    return SamplingParams(
        **chosen,
        max_tokens=max_tokens,
        stop_token_ids=sorted(stops),
        ignore_eos=True,
        logprobs=sampling.logprobs,
        logit_bias=_logit_bias(sampling, resumed_token_ids) or None,
        structured_outputs=None if constraint is None else StructuredOutputsParams(structural_tag=constraint),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _logit_bias(sampling: Sampling, resumed_token_ids: Sequence[int]) -> dict[int, float]:
    """What was asked for, and the penalties of resumed tokens: to vLLM they are prompt, of which it penalises none.

    Both are sums over the answer, so the part of the tokens so far is a constant. docs/decisions/0034
    """
    bias = dict(sampling.logit_bias)
    presence, frequency = sampling.presence_penalty or 0.0, sampling.frequency_penalty or 0.0
    if presence or frequency:
        for token_id, count in Counter(resumed_token_ids).items():
            bias[token_id] = bias.get(token_id, 0.0) - presence - frequency * count
    return bias


def to_step(output: RequestOutput, *, is_first: bool, alternatives: int | None) -> Step:
    """What vLLM collected for one request since the last call. Raises EngineFailed when vLLM gave the request up."""
    completion = output.outputs[0]
    finish = _FINISH.get(completion.finish_reason) if completion.finish_reason else None
    if completion.finish_reason and finish is None:
        raise EngineFailed(f"vLLM ended a request with '{completion.finish_reason}'")
    token_ids: Sequence[int] = completion.token_ids
    stop_token_id = None
    if finish is FinishReason.STOP:
        token_ids, stop_token_id = token_ids[:-1], token_ids[-1]
    return Step(
        token_ids=token_ids,
        hit_tokens=(output.num_cached_tokens or 0) if is_first else None,
        logprobs=None if alternatives is None else _logprobs(completion, token_ids, alternatives),
        finish=finish,
        stop_token_id=stop_token_id,
    )


def _logprobs(completion: CompletionOutput, token_ids: Sequence[int], alternatives: int) -> list[TokenLogprobs]:
    # vLLM's list still has the stop token at its end; zip leaves it out.
    pairs = zip(token_ids, completion.logprobs or (), strict=False)
    return [_token_logprobs(told, token_id, alternatives) for token_id, told in pairs]


def _token_logprobs(told: Mapping[int, Logprob], token_id: int, alternatives: int) -> TokenLogprobs:
    best = sorted(((other, entry.logprob) for other, entry in told.items()), key=lambda pair: -pair[1])
    return TokenLogprobs(told[token_id].logprob, tuple(best[:alternatives]))
