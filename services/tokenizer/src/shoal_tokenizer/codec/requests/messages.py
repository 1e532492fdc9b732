"""Messages, the request: which bodies are taken, and what they mean.

``messages_body`` has the structure, ``messages_fields`` the verdicts, ``messages_turns`` the conversation.
"""

import re
from typing import Any

import msgspec

from shoal_tokenizer.codec.api import AnswerShape, Api, Converted, RequestNames
from shoal_tokenizer.codec.conversation import AnswerFormat, Conversation, Effort, Thinking, ToolChoice, ToolMode
from shoal_tokenizer.codec.events.messages import ID_PREFIX
from shoal_tokenizer.codec.requests.fields import invalid, refuse_fields, unsupported
from shoal_tokenizer.codec.requests.messages_body import (
    ClientTool,
    Request,
    ThinkingAdaptive,
    ThinkingOff,
    ThinkingOn,
    ToolChoiceAny,
    ToolChoiceNone,
    ToolChoiceTool,
    read_request,
)
from shoal_tokenizer.codec.requests.messages_fields import FIELDS
from shoal_tokenizer.codec.requests.messages_turns import Turns
from shoal_tokenizer.codec.requests.request_errors import decoding_error
from shoal_tokenizer.codec.requests.served_model import ServedModel

__all__ = ["FIELDS", "MessagesConverter", "Request"]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_MAX_STOPS = 16
_MAX_STOP_CHARS = 1024


class MessagesConverter:
    """``RequestConverter`` for one served model."""

    def __init__(self, served: ServedModel, *, drops_billing_line: bool = True) -> None:
        self._served = served
        self._drops_billing_line = drops_billing_line

    def convert(self, body: bytes, names: RequestNames) -> Converted:
        request = read_request(body)
        self._served.check_name(request.model)
        refuse_fields(request if request.mcp_servers else _without_servers(request), FIELDS)
        if request.max_tokens is None and not names.is_count:
            raise invalid("Missing required parameter: 'max_tokens'.", "max_tokens")
        turns = Turns(request.system, request.messages, self._drops_billing_line)
        tools = [_function(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())]
        _check_names(tools)
        conversation = Conversation(
            messages=turns.messages,
            tools=tools or None,
            tool_choice=_choice(request, tools),
            thinking=_thinking(request, is_continued=turns.is_continued),
            answer_format=_answer_format(request),
            is_continued=turns.is_continued,
        )
        return Converted(
            prompt=conversation,
            sampling=self._served.sampling(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=self._served.vocabulary_tokens if request.top_k == 0 else request.top_k,
            ),
            shape=self._shape(request, conversation, names),
            is_agent=bool(tools) or any(message["role"] == "tool" for message in conversation.messages),
            notes=(*turns.notes, *_notes(request)),
            cache_key=_cache_key(request),
        )

    def _shape(self, request: Request, conversation: Conversation, names: RequestNames) -> AnswerShape:
        display = getattr(request.thinking, "display", None)
        return AnswerShape(
            api=Api.MESSAGES,
            response_id=ID_PREFIX + names.request_id,
            created_s=names.created_s,
            model=self._served.name,
            is_stream=bool(request.stream),
            stop_strings=_stops(request),
            has_tools=bool(conversation.tools) and conversation.tool_choice.mode is not ToolMode.NONE,
            is_reasoning_shown=display != "omitted",
        )


def _without_servers(request: Request) -> Request:
    return msgspec.structs.replace(request, mcp_servers=None)  # an empty list asks for nothing


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise unsupported(
            f"Tools of type '{str(kind)[:64]}' are not supported here: there are no server tools, and the model does "
            "not know Anthropic's own. Give a tool with a name and an 'input_schema'.",
            f"{where}.type",
        )
    try:
        read = msgspec.convert(tool, ClientTool)
    except msgspec.ValidationError as error:
        refusal = decoding_error(error, structure=ClientTool)
        raise invalid(refusal.message, f"{where}.{refusal.param}" if refusal.param else where) from None
    if not _NAME.fullmatch(read.name):
        raise invalid("A name has 1 to 128 of the characters a-z, A-Z, 0-9, '_' and '-'.", f"{where}.name")
    function: dict[str, Any] = {"name": read.name}
    if read.description:
        function["description"] = read.description
    function["parameters"] = read.input_schema
    if read.strict is not None:
        function["strict"] = read.strict
    return {"type": "function", "function": function}


def _check_names(tools: list[dict[str, Any]]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in seen:
            raise invalid(f"Two tools have the name '{name}'.", f"tools[{index}].name")
        seen.add(name)


def _choice(request: Request, tools: list[dict[str, Any]]) -> ToolChoice:
    choice = request.tool_choice
    if choice is None:
        return ToolChoice()
    if isinstance(choice, ToolChoiceNone):
        return ToolChoice(ToolMode.NONE)
    if not tools:
        raise invalid("'tool_choice' is only allowed when 'tools' are given.", "tool_choice")
    is_single = bool(choice.disable_parallel_tool_use)
    if isinstance(choice, ToolChoiceTool):
        if all(tool["function"]["name"] != choice.name for tool in tools):
            raise invalid(f"'{choice.name[:64]}' is no tool of 'tools'.", "tool_choice.name")
        return ToolChoice(ToolMode.REQUIRED, (choice.name,), is_single)
    mode = ToolMode.REQUIRED if isinstance(choice, ToolChoiceAny) else ToolMode.AUTO
    return ToolChoice(mode, is_single=is_single)


def _thinking(request: Request, *, is_continued: bool) -> Thinking:
    config, output = request.thinking, request.output_config
    effort = Effort(output.effort) if output is not None and output.effort is not None else None
    if is_continued:
        if isinstance(config, ThinkingOn):
            raise invalid("An answer cannot go on with a given text and think first.", "thinking")
        return Thinking(False)
    if config is None or isinstance(config, ThinkingAdaptive):
        return Thinking(None, effort)
    return Thinking(False) if isinstance(config, ThinkingOff) else Thinking(True, effort)


def _answer_format(request: Request) -> AnswerFormat | None:
    new = request.output_config.format if request.output_config is not None else None
    if new is not None and request.output_format is not None and new != request.output_format:
        raise invalid("'output_config.format' and 'output_format' contradict each other; send one.", "output_format")
    wanted = new or request.output_format
    return AnswerFormat(schema=wanted.json_schema) if wanted is not None else None


def _stops(request: Request) -> tuple[str, ...]:
    stops = tuple(request.stop_sequences or ())
    if len(stops) > _MAX_STOPS or not all(0 < len(text) <= _MAX_STOP_CHARS for text in stops):
        raise invalid(
            f"'stop_sequences' are at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_CHARS} characters.", "stop_sequences"
        )
    return stops


def _cache_key(request: Request) -> str | None:
    user_id = request.metadata.get("user_id") if isinstance(request.metadata, dict) else None
    return user_id if isinstance(user_id, str) and user_id else None


def _notes(request: Request) -> list[str]:
    """What was asked for and has no effect here."""
    asked = {
        "thinking.budget_tokens": getattr(request.thinking, "budget_tokens", None),
        "output_config.task_budget": request.output_config and request.output_config.task_budget,
        "context_management": request.context_management,
        "fallbacks": request.fallbacks,
        "tools[].input_examples": any(tool.get("input_examples") for tool in request.tools or ()),
        "tools[].defer_loading": any(tool.get("defer_loading") for tool in request.tools or ()),
    }
    return [f"{name}: {FIELDS[name].note}" for name, is_asked in asked.items() if is_asked]
