"""Messages, the request: its structure. Every field of the API is here; an unknown one is refused by name."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from shoal_tokenizer.codec.requests.openai_sampling import Object
from shoal_tokenizer.codec.requests.request_errors import body_reader
from shoal_tokenizer.codec.requests.served_model import MAX_TOKENS

MAX_MESSAGES = 20_000  # rendering takes half a second for so many
_Id = Annotated[str, Meta(min_length=1, max_length=256)]
_Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


class RefusedBlock(msgspec.Struct, tag_field="type"):
    """A kind of block that is known and not taken, whatever is in it."""

    is_refused: ClassVar[bool] = True
    instead: ClassVar[str] = "This model takes text only."


class TextBlock(Object, tag_field="type", tag="text"):
    text: str
    cache_control: Any = None
    citations: Any = None


class ThinkingBlock(Object, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedBlock(Object, tag_field="type", tag="redacted_thinking"):
    data: str


class ToolUse(Object, tag_field="type", tag="tool_use"):
    id: _Id
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None
    toolset_name: str | None = None


class Image(RefusedBlock, tag="image"):
    pass


class Document(RefusedBlock, tag="document"):
    instead: ClassVar[str] = "Put the text of the document into a text block."


class SearchResult(RefusedBlock, tag="search_result"):
    instead: ClassVar[str] = "Put the text of the result into a text block."


class ToolReference(RefusedBlock, tag="tool_reference"):
    instead: ClassVar[str] = "Give all tools in 'tools'."


class ServerToolUse(RefusedBlock, tag="server_tool_use"):
    instead: ClassVar[str] = "There are no server tools here."


class WebSearchResult(RefusedBlock, tag="web_search_tool_result"):
    instead: ClassVar[str] = "There are no server tools here."


class WebFetchResult(RefusedBlock, tag="web_fetch_tool_result"):
    instead: ClassVar[str] = "There are no server tools here."


class CodeExecutionResult(RefusedBlock, tag="code_execution_tool_result"):
    instead: ClassVar[str] = "There are no server tools here."


class ContainerUpload(RefusedBlock, tag="container_upload"):
    instead: ClassVar[str] = "There are no containers here."


ResultPart = TextBlock | Image | Document | SearchResult | ToolReference


class ToolResult(Object, tag_field="type", tag="tool_result"):
    tool_use_id: _Id
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None
    cache_control: Any = None
    toolset_name: str | None = None


Block = (
    TextBlock
    | ThinkingBlock
    | RedactedBlock
    | ToolUse
    | ToolResult
    | Image
    | Document
    | SearchResult
    | ToolReference
    | ServerToolUse
    | WebSearchResult
    | WebFetchResult
    | CodeExecutionResult
    | ContainerUpload
)


class Message(Object):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ThinkingOn(Object, tag_field="type", tag="enabled"):
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(Object, tag_field="type", tag="adaptive"):
    display: Literal["summarized", "omitted"] | None = None
    budget_tokens: int | None = None


class ThinkingBetweenTools(Object, tag_field="type", tag="between_tools"):
    display: Literal["summarized", "omitted"] | None = None


class ThinkingOff(Object, tag_field="type", tag="disabled"):
    pass


ThinkingConfig = ThinkingOn | ThinkingAdaptive | ThinkingBetweenTools | ThinkingOff


class JsonSchemaFormat(Object, tag_field="type", tag="json_schema", rename={"json_schema": "schema"}):
    json_schema: dict[str, Any]
    name: str | None = None


class OutputConfig(Object):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonSchemaFormat | None = None
    task_budget: Any = None


class ToolChoiceAuto(Object, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class ToolChoiceAny(Object, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class ToolChoiceTool(Object, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class ToolChoiceNone(Object, tag_field="type", tag="none"):
    pass


class ClientTool(Object):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    input_examples: Any = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: list[str] | None = None


class Request(Object, kw_only=True):
    model: str
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: _Count | None = None  # missing only where tokens are counted
    system: str | list[TextBlock] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    stop_sequences: list[str] | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonSchemaFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone | None = None
    # What changes nothing, or is refused by the table.
    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    speed: Any = None
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    betas: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    billing_policy: Any = None
    safeguards: Any = None
    fallbacks: Any = None
    fallback_credit_token: Any = None
    compaction: Any = None
    thread: Any = None
    container: Any = None
    mcp_servers: Any = None


read_request = body_reader(Request)
