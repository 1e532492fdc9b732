"""Chat Completions, the request: its structure. Every field of the API is here; an unknown one is refused by name."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from shoal_tokenizer.codec.requests.chat_messages import MAX_MESSAGES, Message
from shoal_tokenizer.codec.requests.chat_tools import Choice, Tool
from shoal_tokenizer.codec.requests.openai_sampling import Count, Object, SamplingRequest
from shoal_tokenizer.codec.requests.request_errors import body_reader

EffortWord = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]


class ThinkingSwitch(Object):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class TemplateVariables(Object):
    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: EffortWord | None = None


class PlainFormat(Object, tag_field="type", tag="text"):
    pass


class JsonFormat(Object, tag_field="type", tag="json_object"):
    pass


class NamedSchema(Object, rename={"json_schema": "schema"}):
    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = None
    strict: bool | None = None


class SchemaFormat(Object, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema


class RegexFormat(Object, tag_field="type", tag="regex"):
    regex: Annotated[str, Meta(min_length=1, max_length=8192)]


class Request(SamplingRequest, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    response_format: PlainFormat | JsonFormat | SchemaFormat | RegexFormat | None = None
    reasoning_effort: EffortWord | None = None
    modalities: list[str] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=1024)] | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: Any = None
    # Beyond OpenAI's API, spelled as DeepSeek's and other open servers spell them.
    thinking: ThinkingSwitch | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    # Known, not offered here.
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    moderation: Any = None
    chat_template: Any = None
    min_tokens: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None


read_request = body_reader(Request)
