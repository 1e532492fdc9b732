"""Responses, the request: tools, and which of them may or must be called.

A custom tool takes one text; model families see it as a function with the one string ``input``. A tool of a namespace
is called ``namespace::name`` there. Both names go into the answer's shape, so that calls come out as they were offered.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shoal_tokenizer.codec.conversation import ToolChoice, ToolMode
from shoal_tokenizer.codec.requests.custom_tools import GRAMMAR_NOTE, INPUT_SCHEMA, describe_grammar
from shoal_tokenizer.codec.requests.fields import invalid, unsupported
from shoal_tokenizer.codec.requests.responses_items import Object
from shoal_tokenizer.codec.requests.responses_turns import flat_name

_SHOWN_KIND_CHARS = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")

_HOSTED = "Hosted tools are not offered here: offer a function instead."
REFUSED_TOOLS = {
    "file_search": _HOSTED,
    "computer": _HOSTED,
    "computer_use_preview": _HOSTED,
    "computer_use": _HOSTED,
    "web_search_preview": _HOSTED,
    "web_search_preview_2025_03_11": _HOSTED,
    "mcp": "Connect to the server yourself and offer its tools as functions.",
    "code_interpreter": _HOSTED,
    "programmatic_tool_calling": _HOSTED,
    "image_generation": _HOSTED,
    "local_shell": "Offer the shell as a function instead.",
    "shell": "Offer the shell as a function instead.",
    "apply_patch": "Offer the patch tool as a custom tool instead.",
    "tool_search": "Put all tools into 'tools'.",
}
SEARCH_TOOLS = ("web_search", "web_search_2025_08_26")
_SEARCH_ADVICE = 'Leave it out (Codex: web_search = "disabled"), or offer a function instead.'
TAKEN_TOOLS = ("function", "custom", "namespace")
TAKEN_CHOICES = ("function", "custom", "allowed_tools")


class FunctionTool(Object, tag_field="type", tag="function", kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None
    is_async: bool | None = msgspec.field(default=None, name="async")


class TextFormat(Object, tag_field="type", tag="text"):
    pass


class GrammarFormat(Object, tag_field="type", tag="grammar"):
    definition: str
    syntax: Literal["lark", "regex"]


class CustomTool(Object, tag_field="type", tag="custom", kw_only=True):
    name: str
    description: str | None = None
    format: TextFormat | GrammarFormat | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    is_async: bool | None = msgspec.field(default=None, name="async")


class NamespaceTool(Object, tag_field="type", tag="namespace", kw_only=True):
    name: str
    description: str
    tools: list[FunctionTool | CustomTool]


class IdleSearch(msgspec.Struct, tag_field="type", tag="web_search"):
    """A web search that may not go to the web. Codex offers one in every request unless it is told not to."""


class IdleDatedSearch(msgspec.Struct, tag_field="type", tag="web_search_2025_08_26"):
    """The same by its other name."""


Tool = FunctionTool | CustomTool | NamespaceTool | IdleSearch | IdleDatedSearch


class _NamedChoice(Object):
    name: str


class FunctionChoice(_NamedChoice, tag_field="type", tag="function"):
    pass


class CustomChoice(_NamedChoice, tag_field="type", tag="custom"):
    pass


class AllowedChoice(Object, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice | CustomChoice], Meta(min_length=1)]


Choice = str | FunctionChoice | CustomChoice | AllowedChoice


def check_name(name: str, where: str) -> None:
    """BadRequest for what the API does not take as a name."""
    if not _NAME.fullmatch(name):
        raise invalid("A name has 1 to 128 of the characters a-z, A-Z, 0-9, '_' and '-'.", f"{where}.name")


def is_idle_search(tool: dict[str, Any]) -> bool:
    """As the caller wrote it. Models do well without it, so it is left out instead of refused."""
    return tool.get("type") in SEARCH_TOOLS and tool.get("external_web_access") is False


def refuse_kinds(tools: list[Any], choice: Any) -> None:
    """BadRequest for kinds of tools and choices that are not taken, by their name."""
    for index, tool in enumerate(tools):
        if isinstance(tool, dict) and isinstance(tool.get("type"), str) and not is_idle_search(tool):
            _refuse_kind(tool["type"], TAKEN_TOOLS, f"tools[{index}]")
    if isinstance(choice, dict) and isinstance(choice.get("type"), str):
        _refuse_kind(choice["type"], TAKEN_CHOICES, "tool_choice")


def _refuse_kind(kind: str, taken: tuple[str, ...], where: str) -> None:
    if kind in taken:
        return
    advice = _SEARCH_ADVICE if kind in SEARCH_TOOLS else REFUSED_TOOLS.get(kind)
    if advice is not None:
        raise unsupported(f"'{kind}' is not supported here. {advice}", where)
    known = ", ".join(map(repr, taken))
    raise invalid(f"Invalid value: '{kind[:_SHOWN_KIND_CHARS]}'. Supported values are: {known}.", f"{where}.type")


@dataclass(slots=True)
class Toolbox:
    """The tools of one request as families see them, and the way back to how they were offered."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    custom: list[str] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)

    def add(self, tool: Tool, where: str) -> None:
        if isinstance(tool, NamespaceTool):
            check_name(tool.name, where)
            for index, inner in enumerate(tool.tools):
                self._add(inner, tool.name, f"{where}.tools[{index}]")
        elif isinstance(tool, IdleSearch | IdleDatedSearch):
            self.notes.append(f"{where}: web search is not offered here; the model was not told of it.")
        else:
            self._add(tool, None, where)

    def choice(self, choice: Choice | None, is_single: bool) -> ToolChoice:
        """BadRequest for a choice of tools that are not there."""
        is_single = is_single and bool(self.functions)
        if choice is None or isinstance(choice, str):
            return ToolChoice(self._mode(choice or "auto"), is_single=is_single)
        if isinstance(choice, AllowedChoice):
            names = [self._chosen(c.name, f"tool_choice.tools[{n}].name") for n, c in enumerate(choice.tools)]
            mode = ToolMode.REQUIRED if choice.mode == "required" else ToolMode.AUTO
            return ToolChoice(mode, tuple(dict.fromkeys(names)), is_single)
        return ToolChoice(ToolMode.REQUIRED, (self._chosen(choice.name, "tool_choice.name"),), is_single)

    def _mode(self, choice: str) -> ToolMode:
        if choice not in ("none", "auto", "required"):
            raise invalid("'tool_choice' is 'none', 'auto', 'required' or an object.", "tool_choice")
        if choice == "required" and not self.functions:
            raise invalid("'tool_choice' is 'required', but there are no 'tools'.", "tool_choice")
        return ToolMode(choice)

    def _chosen(self, name: str, where: str) -> str:
        """The flat name; a tool of a namespace may also be chosen by its name alone when that is clear."""
        if name in self._names:
            return name
        inside = [flat for flat, (_namespace, inner) in self.namespaces.items() if inner == name]
        if len(inside) != 1:
            raise invalid(f"'{name[:_SHOWN_KIND_CHARS]}' is not one of 'tools'.", where)
        return inside[0]

    def _add(self, tool: FunctionTool | CustomTool, namespace: str | None, where: str) -> None:
        check_name(tool.name, where)
        _refuse_other_callers(tool, where)
        name = flat_name(namespace, tool.name)
        if name in self._names:
            raise invalid(f"Two tools have the name '{name}'.", f"{where}.name")
        self._names.add(name)
        if namespace is not None:
            self.namespaces[name] = (namespace, tool.name)
        if isinstance(tool, CustomTool):
            self.custom.append(name)
            function: dict[str, Any] = {"name": name, "parameters": INPUT_SCHEMA}
            description = self._custom_description(tool, where)
        else:
            function = {"name": name, "parameters": tool.parameters, "strict": tool.strict or None}
            description = tool.description
        function["description"] = description
        shown = {key: function.get(key) for key in ("name", "description", "parameters", "strict")}
        kept = {key: value for key, value in shown.items() if value is not None}
        self.functions.append({"type": "function", "function": kept})

    def _custom_description(self, tool: CustomTool, where: str) -> str | None:
        if not isinstance(tool.format, GrammarFormat):
            return tool.description
        self.notes.append(f"{where}.format: {GRAMMAR_NOTE}")
        return describe_grammar(tool.description, tool.format.syntax, tool.format.definition)


def _refuse_other_callers(tool: FunctionTool | CustomTool, where: str) -> None:
    if tool.is_async:
        raise unsupported("Asynchronous tools are not supported here.", f"{where}.async")
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        raise unsupported("Only tools that the model calls itself are supported here.", f"{where}.allowed_callers")
