"""Chat Completions, the request: which bodies are taken, and what they mean.

Every field is taken, refused by name, or on the short list of those that change nothing here (``_Ignored``); none is
dropped in silence. Errors name the field in the API's own spelling.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1.common_pb2 import INVALID_REQUEST, MODEL_NOT_FOUND, UNSUPPORTED
from shoal_tokenizer.codec.api import AnswerShape, Api, Conversation, Converted, RequestNames, Sampling
from shoal_tokenizer.codec.request_errors import decoding_error

_MAX_MESSAGES = 20_000  # rendering takes half a second for so many
_MAX_STOPS = 4
_MAX_STOP_CHARS = 1024
_MAX_TOKENS = 2**31 - 1

_Count = Annotated[int, Meta(ge=1, le=_MAX_TOKENS)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class _Object(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _TextPart(_Object, tag_field="type", tag="text"):
    text: str


class _RefusalPart(_Object, tag_field="type", tag="refusal"):
    refusal: str


class _ImagePart(_Object, tag_field="type", tag="image_url"):
    image_url: Any


class _AudioPart(_Object, tag_field="type", tag="input_audio"):
    input_audio: Any


class _FilePart(_Object, tag_field="type", tag="file"):
    file: Any


_Part = _TextPart | _RefusalPart | _ImagePart | _AudioPart | _FilePart
_Content = str | Annotated[list[_Part], Meta(min_length=1)]


class _FunctionCall(_Object):
    name: str
    arguments: str


class _ToolCall(_Object):
    id: str
    function: _FunctionCall
    type: Literal["function"] = "function"


class _System(_Object, tag_field="role", tag="system"):
    content: _Content
    name: str | None = None


class _Developer(_Object, tag_field="role", tag="developer"):
    content: _Content
    name: str | None = None


class _User(_Object, tag_field="role", tag="user"):
    content: _Content
    name: str | None = None


class _Assistant(_Object, tag_field="role", tag="assistant"):
    content: _Content | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    # SDKs send back the whole message that they got, with these set to null.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class _ToolResult(_Object, tag_field="role", tag="tool"):
    content: _Content
    tool_call_id: str
    name: str | None = None


_Message = _System | _Developer | _User | _Assistant | _ToolResult


class _Function(_Object):
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(_Object):
    type: Literal["function"]
    function: _Function


class _StreamOptions(_Object):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # padding against traffic analysis; the TLS edge's business


class _ResponseFormat(msgspec.Struct):
    type: str


class _Ignored(_Object):
    """Fields that are taken and change nothing: labels for the provider's own books, and hints."""

    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None


class _Request(_Ignored, kw_only=True):
    model: str
    messages: Annotated[list[_Message], Meta(min_length=1, max_length=_MAX_MESSAGES)]
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    response_format: _ResponseFormat | None = None
    modalities: list[str] | None = None
    # Beyond OpenAI's API, spelled as other open servers spell them.
    top_k: Annotated[int, Meta(ge=1, le=_MAX_TOKENS)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    # Known to OpenAI's API, not offered here.
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None
    prompt_cache_retention: Any = None


_NOT_OFFERED = (
    "audio",
    "functions",
    "function_call",
    "prediction",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
    "moderation",
    "prompt_cache_retention",
)
_decoder = msgspec.json.Decoder(_Request)
_json = msgspec.json.Decoder()


class ChatCompletionsConverter:
    """``RequestConverter`` for one served model."""

    def __init__(self, model: str, defaults: Sampling, vocabulary_size: int) -> None:
        self._model = model
        self._defaults = defaults
        self._vocabulary_size = vocabulary_size

    def convert(self, body: bytes, names: RequestNames) -> Converted:
        try:
            request = _decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise decoding_error(error, roles=("system", "developer", "user", "assistant", "tool")) from None
        if request.model != self._model:
            raise BadRequest(
                MODEL_NOT_FOUND,
                f"The model '{request.model[:200]}' does not exist. This server has '{self._model}'.",
                param="model",
            )
        _refuse_what_is_not_offered(request)
        conversation = Conversation(
            [_message(message, index) for index, message in enumerate(request.messages)],
            _tools(request),
        )
        return Converted(
            conversation=conversation,
            sampling=self._sampling(request),
            shape=self._shape(request, names),
            is_agent=bool(request.tools) or any(message["role"] == "tool" for message in conversation.messages),
        )

    def _sampling(self, request: _Request) -> Sampling:
        defaults = self._defaults
        ignores_eos = bool(request.ignore_eos)
        return Sampling(
            max_tokens=_max_tokens(request),
            temperature=_first(request.temperature, defaults.temperature),
            top_p=_first(request.top_p, defaults.top_p),
            top_k=_first(request.top_k, defaults.top_k),
            min_p=_first(request.min_p, defaults.min_p),
            # Engines take non-negative seeds; the sign bit is dropped so that equal seeds stay equal.
            seed=None if request.seed is None else request.seed & (2**63 - 1),
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
            stop_token_ids=[] if ignores_eos else list(defaults.stop_token_ids),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            logit_bias=self._logit_bias(request),
            ignore_eos=ignores_eos,
        )

    def _logit_bias(self, request: _Request) -> dict[int, float]:
        bias: dict[int, float] = {}
        for key, value in (request.logit_bias or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < self._vocabulary_size):
                raise _invalid(
                    f"Keys of 'logit_bias' are token ids from 0 to {self._vocabulary_size - 1}.", "logit_bias"
                )
            bias[int(key)] = value
        return bias

    def _shape(self, request: _Request, names: RequestNames) -> AnswerShape:
        is_stream = bool(request.stream)
        if request.stream_options is not None and not is_stream:
            raise _invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        if request.top_logprobs is not None and not request.logprobs:
            raise _invalid("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
        return AnswerShape(
            api=Api.CHAT_COMPLETIONS,
            response_id=f"chatcmpl-{names.request_id}",
            created_s=names.created_s,
            model=self._model,
            is_stream=is_stream,
            stop_strings=_stop_strings(request.stop),
            has_usage_event=request.stream_options is not None and request.stream_options.include_usage,
            has_logprobs=bool(request.logprobs),
            top_logprobs=request.top_logprobs or 0,
        )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _invalid(message: str, param: str) -> BadRequest:
    return BadRequest(INVALID_REQUEST, message, param=param)


def _unsupported(message: str, param: str) -> BadRequest:
    return BadRequest(UNSUPPORTED, message, param=param)


def _refuse_what_is_not_offered(request: _Request) -> None:
    for name in _NOT_OFFERED:
        if getattr(request, name) is not None:
            raise _unsupported(f"'{name}' is not supported by this model.", name)
    if request.n not in (None, 1):
        raise _unsupported("Only one answer a request is supported: leave out 'n' or set it to 1.", "n")
    if request.response_format is not None and request.response_format.type != "text":
        raise _unsupported("Only 'response_format' of type 'text' is supported by this model.", "response_format")
    if request.modalities not in (None, ["text"]):
        raise _unsupported("Only the modality 'text' is supported by this model.", "modalities")


def _max_tokens(request: _Request) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise _invalid("'max_tokens' and 'max_completion_tokens' contradict each other; send one.", "max_tokens")
    return new if new is not None else old


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > _MAX_STOPS:
        raise _invalid(f"'stop' takes at most {_MAX_STOPS} strings.", "stop")
    if not all(stops):
        raise _invalid("Strings of 'stop' must not be empty.", "stop")
    if any(len(text) > _MAX_STOP_CHARS for text in stops):
        raise _invalid(f"Strings of 'stop' have at most {_MAX_STOP_CHARS} characters.", "stop")
    return stops


def _tools(request: _Request) -> list[dict[str, Any]] | None:
    if request.tool_choice is not None and not request.tools:
        raise _invalid("'tool_choice' is only allowed when 'tools' are given.", "tool_choice")
    if request.tool_choice not in (None, "auto", "none"):
        raise _unsupported("Only 'auto' and 'none' are supported by this model.", "tool_choice")
    if not request.tools or request.tool_choice == "none":
        return None
    return [
        {
            "type": "function",
            "function": {
                name: value
                for name, value in (
                    ("name", tool.function.name),
                    ("description", tool.function.description),
                    ("parameters", tool.function.parameters),
                )
                if value is not None
            },
        }
        for tool in request.tools
    ]


def _message(message: _Message, index: int) -> dict[str, Any]:
    """A message as chat templates read it; text parts are joined by line breaks."""
    where = f"messages[{index}]"
    if isinstance(message, _Assistant):
        return _assistant(message, where)
    shown: dict[str, Any] = {"role": "system", "content": _text(message.content, where)}
    if isinstance(message, _User):
        shown["role"] = "user"
    elif isinstance(message, _ToolResult):
        shown |= {"role": "tool", "tool_call_id": message.tool_call_id}
    return shown


def _assistant(message: _Assistant, where: str) -> dict[str, Any]:
    for name in ("refusal", "annotations", "audio", "function_call"):
        if getattr(message, name):
            raise _unsupported(f"'{name}' of an earlier answer is not supported by this model.", f"{where}.{name}")
    if message.content is None and not message.tool_calls:
        raise _invalid("An assistant message needs 'content' or 'tool_calls'.", f"{where}.content")
    shown: dict[str, Any] = {
        "role": "assistant",
        "content": "" if message.content is None else _text(message.content, where),
    }
    if message.tool_calls:
        shown["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls)
        ]
    return shown


def _tool_call(call: _ToolCall, where: str) -> dict[str, Any]:
    try:
        arguments = _json.decode(call.function.arguments)
    except (msgspec.MsgspecError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise _invalid("'arguments' must be a JSON object, written as a string.", f"{where}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _text(content: str | Sequence[_Part], where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        if isinstance(part, _TextPart):
            texts.append(part.text)
        else:
            kind = str(part.__struct_config__.tag)
            raise _unsupported(f"This model takes text only, not '{kind}'.", f"{where}.content[{index}]")
    return "\n".join(texts)
