"""Responses, the request: its structure. Every field of the API is here; an unknown one is refused by name."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from shoal_contracts.errors import BadRequest
from shoal_tokenizer.codec.requests.request_errors import decoding_error
from shoal_tokenizer.codec.requests.responses_items import Item, Object, name_items
from shoal_tokenizer.codec.requests.responses_tools import Choice, Tool, refuse_kinds
from shoal_tokenizer.codec.requests.served_model import MAX_TOKENS

_ROLES = ("system", "developer", "user", "assistant")
_T = TypeVar("_T")
_parse = msgspec.json.Decoder().decode

Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
_Label = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], _Label], Meta(max_length=16)]


class StreamOptions(Object):
    include_obfuscation: bool | None = None


class ReasoningSettings(Object):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


class PlainFormat(Object, tag_field="type", tag="text"):
    pass


class SchemaFormat(Object, tag_field="type", tag="json_schema", rename={"json_schema": "schema"}):
    name: str
    json_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonFormat(Object, tag_field="type", tag="json_object"):
    pass


class TextSettings(Object):
    format: PlainFormat | SchemaFormat | JsonFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class CacheOptions(Object, rename={"lifetime": "ttl"}):
    comparison_response_id: Any = None
    mode: Any = None
    prewarm: bool | None = None
    lifetime: Any = None


class Request(Object, kw_only=True):
    model: str
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: list[Includable] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=1024)] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    client_metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    # Known to the API, not offered here.
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    access_programs: Any = None
    background_options: Any = None
    image: Any = None


def read_request(body: bytes) -> tuple[Request, dict[str, Any]]:
    """The request, and the JSON that it was read from, kinds of items written in. Raises BadRequest."""

    def read() -> tuple[Request, dict[str, Any]]:
        parsed = _parse(body)
        if isinstance(parsed, dict):
            tools = parsed.get("tools")
            refuse_kinds(tools if isinstance(tools, list) else [], parsed.get("tool_choice"))
            if isinstance(parsed.get("input"), list):
                name_items(parsed["input"], "input")
        return msgspec.convert(parsed, Request), parsed

    return _guarded(read)


def read_history(history: bytes) -> list[Item]:
    """Items of earlier responses, as they were stored. Raises BadRequest."""

    def read() -> list[Item]:
        parsed = _parse(history)
        if isinstance(parsed, list):
            name_items(parsed, "previous_response_id")
        return msgspec.convert(parsed, list[Item])

    return _guarded(read)


def _guarded(read: Callable[[], _T]) -> _T:
    try:
        return read()
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _error(error) from None


def _error(error: Exception) -> BadRequest:
    return decoding_error(error, roles=_ROLES)
