"""What Chat Completions and Completions have in common: how tokens are chosen, where an answer ends, how it is sent."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shoal_tokenizer.codec.api import Sampling
from shoal_tokenizer.codec.requests.fields import (
    HONOURED,
    Field,
    FieldTable,
    ignored,
    invalid,
    translated,
    unsupported,
)
from shoal_tokenizer.codec.requests.served_model import MAX_TOKENS, ServedModel

_MAX_STOPS = 16  # as DeepSeek's API; OpenAI's takes four
_MAX_STOP_CHARS = 1024
_MAX_CHOICES = 8  # each is a whole generation

Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class Object(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object in which every field is known."""


class StreamOptions(Object):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingRequest(Object, kw_only=True):
    """The fields; those below the line are not OpenAI's, and spelled as other open servers spell them."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # ---
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=128)] | None = None


_OPEN = "Not OpenAI's: spelled as vLLM and SGLang spell it."
SAMPLING_FIELDS: dict[str, Field] = {
    "model": HONOURED,
    "max_tokens": HONOURED,
    "temperature": HONOURED,
    "top_p": HONOURED,
    "presence_penalty": HONOURED,
    "frequency_penalty": HONOURED,
    "logit_bias": HONOURED,
    "seed": translated("A negative seed loses its sign bit; equal seeds stay equal."),
    "n": translated(f"Up to {_MAX_CHOICES}, where OpenAI takes 128; with a seed each answer has its own."),
    "stop": translated(f"Up to {_MAX_STOPS} strings, where OpenAI takes 4."),
    "stream": HONOURED,
    "stream_options": HONOURED,
    "user": ignored("A label for the provider's own books."),
    "top_k": translated(f"{_OPEN} 0 and -1 mean all tokens."),
    "min_p": Field(HONOURED.verdict, _OPEN),
    "repetition_penalty": Field(HONOURED.verdict, _OPEN),
    "ignore_eos": Field(HONOURED.verdict, _OPEN),
    "stop_token_ids": Field(HONOURED.verdict, f"{_OPEN} Beside the model's own."),
}
STREAM_FIELDS: FieldTable = {
    "stream_options.include_usage": HONOURED,
    "stream_options.include_obfuscation": ignored("Events are not padded."),
}


def choose_tokens(served: ServedModel, request: SamplingRequest, **more: Any) -> Sampling:
    """Sampling as asked for; ``more`` are fields of ``Sampling`` that the APIs spell in different ways."""
    sampling = served.sampling(
        ignores_eos=bool(request.ignore_eos),
        logit_bias=request.logit_bias,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=_top_k(request.top_k, served),
        min_p=request.min_p,
        seed=request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        **more,
    )
    for token_id in request.stop_token_ids or ():
        if token_id >= served.vocabulary_tokens:
            raise invalid(f"Token ids go from 0 to {served.vocabulary_tokens - 1}.", "stop_token_ids")
        if token_id not in sampling.stop_token_ids:
            sampling.stop_token_ids.append(token_id)
    return sampling


def check_delivery(request: SamplingRequest) -> None:
    """BadRequest for too many answers, and for options of a stream without a stream."""
    if choices(request) > _MAX_CHOICES:
        raise unsupported(f"At most {_MAX_CHOICES} answers a request: set 'n' to less, or send several requests.", "n")
    if request.stream_options is not None and not request.stream:
        raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")


def choices(request: SamplingRequest) -> int:
    """How many answers are wanted."""
    return request.n or 1


def wants_usage_event(request: SamplingRequest) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def stop_strings(request: SamplingRequest) -> tuple[str, ...]:
    """BadRequest for what would stop every answer, and for more than can be searched for."""
    stop = request.stop
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > _MAX_STOPS:
        raise invalid(f"'stop' takes at most {_MAX_STOPS} strings.", "stop")
    if not all(stops):
        raise invalid("Strings of 'stop' must not be empty.", "stop")
    if any(len(text) > _MAX_STOP_CHARS for text in stops):
        raise invalid(f"Strings of 'stop' have at most {_MAX_STOP_CHARS} characters.", "stop")
    return stops


def _top_k(asked: int | None, served: ServedModel) -> int | None:
    """All tokens are what the vocabulary has; None would be the model's own default."""
    return served.vocabulary_tokens if asked is not None and asked < 1 else asked
