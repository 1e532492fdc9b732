"""Chat Completions, the request: tools, and which of them may or must be called."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from shoal_tokenizer.codec.conversation import ToolChoice, ToolMode
from shoal_tokenizer.codec.requests.custom_tools import GRAMMAR_NOTE, INPUT_SCHEMA, describe_grammar
from shoal_tokenizer.codec.requests.fields import invalid
from shoal_tokenizer.codec.requests.openai_sampling import Object

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SHOWN_NAME_CHARS = 64


class Function(Object):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Object, tag_field="type", tag="function"):
    function: Function
    cache_control: Any = None


class TextFormat(Object, tag_field="type", tag="text"):
    pass


class Grammar(Object):
    definition: str
    syntax: Literal["lark", "regex"]


class GrammarFormat(Object, tag_field="type", tag="grammar"):
    grammar: Grammar


class Custom(Object):
    name: str
    description: str | None = None
    format: TextFormat | GrammarFormat | None = None


class CustomTool(Object, tag_field="type", tag="custom"):
    custom: Custom
    cache_control: Any = None


Tool = FunctionTool | CustomTool


class Named(Object):
    name: str


class FunctionChoice(Object, tag_field="type", tag="function"):
    function: Named


class CustomChoice(Object, tag_field="type", tag="custom"):
    custom: Named


class AllowedTools(Object):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice | CustomChoice], Meta(min_length=1)]


class AllowedChoice(Object, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


Choice = Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedChoice


def check_name(name: str, where: str) -> None:
    """BadRequest for what the API does not take as a name."""
    if not _NAME.fullmatch(name):
        raise invalid("A name has 1 to 64 of the characters a-z, A-Z, 0-9, '_' and '-'.", where)


class Toolbox:
    """The tools of one request as families see them, and which of them are custom ones."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.functions: list[dict[str, Any]] = []
        self.custom: list[str] = []
        self.notes: list[str] = []
        self._names: set[str] = set()
        for index, tool in enumerate(tools):
            self._add(tool, f"tools[{index}]")

    def choice(self, choice: Choice | None, *, is_single: bool) -> ToolChoice:
        """BadRequest for a choice of tools that are not there."""
        is_single = is_single and bool(self.functions)
        if choice is None or isinstance(choice, str):
            mode = ToolMode(choice or "auto")
            if mode is ToolMode.REQUIRED and not self.functions:
                raise invalid("'tool_choice' is 'required', but there are no 'tools'.", "tool_choice")
            return ToolChoice(mode, is_single=is_single)
        if isinstance(choice, AllowedChoice):
            allowed = choice.allowed_tools
            where = "tool_choice.allowed_tools.tools"
            names = [self._chosen(entry, f"{where}[{index}]") for index, entry in enumerate(allowed.tools)]
            return ToolChoice(ToolMode(allowed.mode), tuple(dict.fromkeys(names)), is_single)
        return ToolChoice(ToolMode.REQUIRED, (self._chosen(choice, "tool_choice"),), is_single)

    def _chosen(self, choice: FunctionChoice | CustomChoice, where: str) -> str:
        is_custom = isinstance(choice, CustomChoice)
        name = choice.custom.name if isinstance(choice, CustomChoice) else choice.function.name
        if name not in self._names or (name in self.custom) != is_custom:
            kind = "custom" if is_custom else "function"
            raise invalid(f"'{name[:_SHOWN_NAME_CHARS]}' is no {kind} of 'tools'.", f"{where}.{kind}.name")
        return name

    def _add(self, tool: Tool, where: str) -> None:
        function = self._custom(tool.custom, where) if isinstance(tool, CustomTool) else _function(tool.function)
        place = f"{where}.custom.name" if isinstance(tool, CustomTool) else f"{where}.function.name"
        name = function["name"]
        check_name(name, place)
        if name in self._names:
            raise invalid(f"Two tools have the name '{name}'.", place)
        self._names.add(name)
        kept = {key: value for key, value in function.items() if value is not None}
        self.functions.append({"type": "function", "function": kept})

    def _custom(self, custom: Custom, where: str) -> dict[str, Any]:
        self.custom.append(custom.name)
        description = custom.description
        if isinstance(custom.format, GrammarFormat):
            grammar = custom.format.grammar
            description = describe_grammar(description, grammar.syntax, grammar.definition)
            self.notes.append(f"{where}.custom.format: {GRAMMAR_NOTE}")
        return {"name": custom.name, "description": description, "parameters": INPUT_SCHEMA}


def _function(function: Function) -> dict[str, Any]:
    return {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
        "strict": function.strict or None,
    }
