"""Completions, the request: a text that the model goes on with, without any conversation around it."""

from typing import Annotated, Any

from msgspec import Meta

from shoal_tokenizer.codec.api import AnswerShape, Api, Converted, RequestNames
from shoal_tokenizer.codec.conversation import RawText
from shoal_tokenizer.codec.events.completions import ID_PREFIX
from shoal_tokenizer.codec.requests.fields import (
    HONOURED,
    FieldTable,
    invalid,
    refuse_fields,
    refused,
    translated,
    unsupported,
)
from shoal_tokenizer.codec.requests.openai_sampling import (
    SAMPLING_FIELDS,
    STREAM_FIELDS,
    SamplingRequest,
    check_delivery,
    choices,
    choose_tokens,
    stop_strings,
    wants_usage_event,
)
from shoal_tokenizer.codec.requests.request_errors import body_reader
from shoal_tokenizer.codec.requests.served_model import ServedModel

_DEFAULT_MAX_TOKENS = 16  # the API's own


class Request(SamplingRequest, kw_only=True):
    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    suffix: Any = None


FIELDS: FieldTable = {
    **SAMPLING_FIELDS,
    "max_tokens": translated(f"Left out, it is {_DEFAULT_MAX_TOKENS}, as in OpenAI's API."),
    "prompt": translated("A text, or a list of one; token ids and several prompts are refused."),
    "logprobs": HONOURED,
    "echo": translated("False only: the prompt is not repeated."),
    "best_of": translated("Equal to 'n' only: none is thrown away."),
    "suffix": refused("Write what comes behind the gap into the prompt."),
    **STREAM_FIELDS,
    "prompt: a text": HONOURED,
    "prompt: a list of one text": HONOURED,
    "prompt: a list of several texts": refused("Send one request for each."),
    "prompt: token ids": refused("Send the text."),
}

_read_request = body_reader(Request)


class CompletionsConverter:
    """``RequestConverter`` for one served model."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def convert(self, body: bytes, names: RequestNames) -> Converted:
        request = _read_request(body)
        self._served.check_name(request.model)
        _refuse(request)
        sampling = choose_tokens(
            self._served,
            request,
            max_tokens=request.max_tokens if request.max_tokens is not None else _DEFAULT_MAX_TOKENS,
            logprobs=request.logprobs,
        )
        return Converted(
            RawText(_prompt(request.prompt)),
            sampling,
            self._shape(request, names),
            is_agent=False,
            choices=choices(request),
        )

    def _shape(self, request: Request, names: RequestNames) -> AnswerShape:
        return AnswerShape(
            api=Api.COMPLETIONS,
            response_id=ID_PREFIX + names.request_id,
            created_s=names.created_s,
            model=self._served.name,
            is_stream=bool(request.stream),
            stop_strings=stop_strings(request),
            has_usage_event=wants_usage_event(request),
            has_logprobs=request.logprobs is not None,
            top_logprobs=request.logprobs or 0,
        )


def _refuse(request: Request) -> None:
    refuse_fields(request, FIELDS)
    check_delivery(request)
    if request.echo:
        raise unsupported("The prompt is not repeated: leave out 'echo'.", "echo")
    if request.best_of not in (None, choices(request)):
        raise unsupported("Every answer is returned: leave out 'best_of' or set it to 'n'.", "best_of")


def _prompt(prompt: str | list[Any]) -> str:
    """The one text to go on with."""
    texts = [prompt] if isinstance(prompt, str) else prompt
    if any(not isinstance(text, str) for text in texts):
        if all(isinstance(text, int | list) for text in texts):
            raise unsupported("Token ids are not taken as a prompt: send the text.", "prompt")
        raise invalid("'prompt' must be a string, or a list of one.", "prompt")
    if len(texts) > 1:
        raise unsupported("Only one prompt a request is supported: send one request for each.", "prompt")
    if not texts or not texts[0]:
        raise invalid("'prompt' must not be empty.", "prompt")
    return str(texts[0])
