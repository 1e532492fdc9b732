"""Responses, the request: input items of every kind that is taken, and which words the others are refused with.

``name_items`` goes over the parsed JSON before it is decoded strictly: it names the kind of items that may leave it
out, and refuses the kinds that are not taken by their name.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shoal_tokenizer.codec.requests.fields import invalid, unsupported

MAX_ITEMS = 20_000  # rendering takes half a second for so many
_SHOWN_KIND_CHARS = 64

Status = Literal["in_progress", "completed", "incomplete"]
_CallId = Annotated[str, Meta(min_length=1, max_length=256)]

# Refused kinds, and what to do instead.
_HOSTED = "Items of hosted tools cannot be continued here: leave them out."
REFUSED_ITEMS = {
    "item_reference": "Send the item itself, or go on with 'previous_response_id'.",
    "compaction": "It can be read by the server that made it only: send the items themselves.",
    "compaction_trigger": "Compaction is not offered here: shorten the input yourself.",
    "configuration_update": "Send the settings with the request.",
    "additional_tools": "Put them into 'tools'.",
    "tool_search_call": "Tool search is not offered here: put all tools into 'tools'.",
    "tool_search_output": "Tool search is not offered here: put all tools into 'tools'.",
    "program": _HOSTED,
    "program_output": _HOSTED,
    "file_search_call": _HOSTED,
    "web_search_call": _HOSTED,
    "computer_call": _HOSTED,
    "computer_call_output": _HOSTED,
    "code_interpreter_call": _HOSTED,
    "image_generation_call": _HOSTED,
    "local_shell_call": "Offer the shell as a function and send 'function_call' items.",
    "local_shell_call_output": "Offer the shell as a function and send 'function_call_output' items.",
    "shell_call": "Offer the shell as a function and send 'function_call' items.",
    "shell_call_output": "Offer the shell as a function and send 'function_call_output' items.",
    "apply_patch_call": "Offer the patch tool as a custom tool and send 'custom_tool_call' items.",
    "apply_patch_call_output": "Offer the patch tool as a custom tool and send 'custom_tool_call_output' items.",
    "mcp_list_tools": _HOSTED,
    "mcp_approval_request": _HOSTED,
    "mcp_approval_response": _HOSTED,
    "mcp_call": _HOSTED,
}
TAKEN_ITEMS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
)


class Object(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object in which every field is known."""


class InputText(Object, tag_field="type", tag="input_text"):
    text: str
    prompt_cache_breakpoint: Any = None


class OutputText(Object, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(Object, tag_field="type", tag="refusal"):
    refusal: str


class InputImage(Object, tag_field="type", tag="input_image"):
    detail: Any = None
    file_id: Any = None
    image_url: Any = None
    prompt_cache_breakpoint: Any = None


class InputFile(Object, tag_field="type", tag="input_file"):
    detail: Any = None
    file_data: Any = None
    file_id: Any = None
    file_url: Any = None
    filename: Any = None
    prompt_cache_breakpoint: Any = None


Part = InputText | OutputText | Refusal | InputImage | InputFile
Content = str | list[Part]


class SummaryText(Object, tag_field="type", tag="summary_text"):
    text: str


class ReasoningText(Object, tag_field="type", tag="reasoning_text"):
    text: str


class PlainText(Object, tag_field="type", tag="text"):
    """As Codex spells reasoning that it may show."""

    text: str


class Caller(msgspec.Struct):
    type: str


class _Item(Object):
    """``id`` and ``status`` stand in items that an API gave out; they mean nothing when they come back."""

    id: str | None = None
    status: Status | None = None


class Message(_Item, tag_field="type", tag="message", kw_only=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCall(_Item, tag_field="type", tag="function_call", kw_only=True):
    call_id: _CallId
    name: str
    arguments: str
    namespace: str | None = None
    caller: Caller | None = None
    is_async: bool | None = msgspec.field(default=None, name="async")


class CustomCall(_Item, tag_field="type", tag="custom_tool_call", kw_only=True):
    call_id: _CallId
    name: str
    input: str
    namespace: str | None = None
    caller: Caller | None = None
    is_async: bool | None = msgspec.field(default=None, name="async")


class FunctionOutput(_Item, tag_field="type", tag="function_call_output", kw_only=True):
    call_id: _CallId
    output: Content
    name: str | None = None
    namespace: str | None = None
    caller: Caller | None = None


class CustomOutput(_Item, tag_field="type", tag="custom_tool_call_output", kw_only=True):
    call_id: _CallId
    output: Content
    name: str | None = None
    namespace: str | None = None
    caller: Caller | None = None


class ReasoningPassedBack(_Item, tag_field="type", tag="reasoning", kw_only=True):
    summary: list[SummaryText] | None = None
    content: list[ReasoningText | PlainText] | None = None
    encrypted_content: str | None = None


Item = Message | FunctionCall | CustomCall | FunctionOutput | CustomOutput | ReasoningPassedBack


def name_items(items: list[Any], where: str) -> None:
    """Write the kind into items that left it out; BadRequest for kinds that are not taken."""
    if len(items) > MAX_ITEMS:
        raise invalid(f"'{where}' has {len(items)} items; at most {MAX_ITEMS} are taken.", where)
    for index, item in enumerate(items):
        if isinstance(item, dict):
            _name(item, f"{where}[{index}]")


def _name(item: dict[str, Any], where: str) -> None:
    kind = item.get("type")
    if kind is None:
        kind = item["type"] = "item_reference" if "role" not in item and "id" in item else "message"
    if kind in TAKEN_ITEMS if isinstance(kind, str) else False:
        return
    advice = REFUSED_ITEMS.get(kind) if isinstance(kind, str) else None
    if advice is not None:
        raise unsupported(f"Items of type '{kind}' are not supported here. {advice}", where)
    known = ", ".join(map(repr, TAKEN_ITEMS))
    shown = str(kind)[:_SHOWN_KIND_CHARS] if isinstance(kind, str) else type(kind).__name__
    raise invalid(f"Invalid value: '{shown}'. Supported values are: {known}.", f"{where}.type")
