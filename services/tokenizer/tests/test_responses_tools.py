"""Responses requests: tools and choices of tools."""

import json
from typing import Any

import pytest

from shoal_contracts.v1.common_pb2 import UNSUPPORTED
from shoal_tokenizer.codec.conversation import (
    Conversation,
    ToolChoice,
    ToolMode,
)
from shoal_tokenizer.codec.requests.fields import Verdict
from shoal_tokenizer.codec.requests.responses_fields import FIELDS

from .responses_asked import NAMESPACE, SEARCH, F, G, conversation, convert, refusal


def test_tools_as_the_family_sees_them() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
    converted = convert(
        tools=[{**F, "description": "d", "strict": True}, {**G, "description": "Free.", "format": grammar}, NAMESPACE]
    )
    assert isinstance(converted.prompt, Conversation) and converted.prompt.tools
    f, g, h = [tool["function"] for tool in converted.prompt.tools]
    assert f == {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert g["parameters"] == {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert g["description"].startswith("Free.\n\n") and g["description"].endswith("start: x")
    assert h == {"name": "ns::h", "parameters": {"type": "object"}}
    shape = converted.shape
    assert (shape.custom_tools, shape.namespaces, shape.has_tools) == (("g",), {"ns::h": ("ns", "h")}, True)
    assert converted.is_agent and [note for note in converted.notes if note.startswith("tools[1].format")]


def test_a_search_that_may_not_search_is_left_out_and_told() -> None:
    converted = convert(tools=[SEARCH, F])
    assert isinstance(converted.prompt, Conversation) and converted.prompt.tools
    assert [tool["function"]["name"] for tool in converted.prompt.tools] == ["f"]
    assert [note for note in converted.notes if note.startswith("tools[0]")]
    assert [tool["type"] for tool in json.loads(converted.shape.echo)["fields"]["tools"]] == ["function"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "web_search"}, "tools[1]"),
        ({**SEARCH, "external_web_access": True}, "tools[1]"),
        ({"type": "magic"}, "tools[1].type"),
        ({"name": "f"}, "tools[1].type"),
        ({**F, "new": 1}, "tools[1].new"),
        ({**F, "name": "a b"}, "tools[1].name"),
        ({**F, "name": "x" * 129}, "tools[1].name"),
        ({**F, "async": True}, "tools[1].async"),
        ({**F, "allowed_callers": ["programmatic"]}, "tools[1].allowed_callers"),
        ({**G, "name": "f0"}, "tools[1].name"),
        ({**NAMESPACE, "tools": [F, F]}, "tools[1].tools[1].name"),
        ({**G, "format": {"type": "grammar", "syntax": "bnf", "definition": "x"}}, "tools[1].format.syntax"),
    ],
)
def test_tools_that_cannot_be_offered(tool: dict[str, Any], param: str) -> None:
    assert refusal(tools=[{**F, "name": "f0"}, tool]).param == param


REFUSED_TOOLS = [
    path.split(": ")[1]
    for path, e in FIELDS.items()
    if path.startswith("tools[].type") and e.verdict is Verdict.REFUSED
]


@pytest.mark.parametrize("kind", REFUSED_TOOLS)
def test_hosted_tools_are_refused_by_name(kind: str) -> None:
    for fields, param in (({"tools": [{"type": kind}]}, "tools[0]"), ({"tool_choice": {"type": kind}}, "tool_choice")):
        error = refusal(**fields)
        assert (error.code, error.param) == (UNSUPPORTED, param) and repr(kind) in error.message


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, ToolMode.AUTO, None),
        ("auto", ToolMode.AUTO, None),
        ("none", ToolMode.NONE, None),
        ("required", ToolMode.REQUIRED, None),
        ({"type": "function", "name": "f"}, ToolMode.REQUIRED, ("f",)),
        ({"type": "function", "name": "h"}, ToolMode.REQUIRED, ("ns::h",)),
        ({"type": "function", "name": "ns::h"}, ToolMode.REQUIRED, ("ns::h",)),
        ({"type": "custom", "name": "g"}, ToolMode.REQUIRED, ("g",)),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            ToolMode.AUTO,
            ("f",),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "g"}] * 2},
            ToolMode.REQUIRED,
            ("g",),
        ),
    ],
)
def test_choices(choice: Any, mode: ToolMode, names: tuple[str, ...] | None) -> None:
    converted = convert(tools=[F, G, NAMESPACE], tool_choice=choice, parallel_tool_calls=False)
    assert isinstance(converted.prompt, Conversation)
    assert converted.prompt.tool_choice == ToolChoice(mode, names, is_single=True)
    assert converted.prompt.tools and len(converted.prompt.tools) == 3
    assert converted.shape.has_tools == (mode is not ToolMode.NONE)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("any", "tool_choice"),
        ({"type": "function", "name": "x"}, "tool_choice.name"),
        ({"type": "magic"}, "tool_choice.type"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.tools"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "x"}]},
            "tool_choice.tools[0].type",
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
            "tool_choice.tools[0].name",
        ),
    ],
)
def test_choices_of_what_is_not_there(choice: Any, param: str) -> None:
    assert refusal(tools=[F], tool_choice=choice).param == param


def test_a_call_cannot_be_required_without_tools() -> None:
    assert refusal(tool_choice="required").param == "tool_choice"
    assert conversation(tool_choice="auto", parallel_tool_calls=False).tool_choice == ToolChoice()
