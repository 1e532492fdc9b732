"""The packaged model's template with tools: unchanged without them, in Hermes' form with them."""

import json
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal_model.tool_template import with_tools

OWN = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM = {"role": "system", "content": "Rules."}
USER = {"role": "user", "content": "Hi\n"}
TURN = {"role": "assistant", "content": " x"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"city": "é"}}}
RESULT = {"role": "tool", "content": "warm", "tool_call_id": "1", "name": "look"}


def render(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template).render(messages=messages, **variables)


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, TURN, USER], [USER, TURN], [TURN, SYSTEM]])
@pytest.mark.parametrize("variables", [{}, {"tools": None}, {"tools": [], "add_generation_prompt": True}])
@pytest.mark.parametrize("own", [OWN, OWN + "\n", "  {{ messages | length }} \n x"])
def test_without_tools_nothing_changes(messages: list[dict[str, Any]], variables: dict[str, Any], own: str) -> None:
    assert render(with_tools(own), messages, **variables) == render(own, messages, **variables)


def test_with_tools_it_is_hermes() -> None:
    calling = {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]}
    messages = [SYSTEM, USER, calling, RESULT, RESULT, TURN]
    system, user, call, results, turn, opened = render(
        with_tools(OWN), messages, tools=[TOOL], add_generation_prompt=True
    ).split("<|im_start|>")[1:]
    assert system.startswith("system\nRules.\n\n") and json.dumps(TOOL) in system and system.endswith("<|im_end|>\n")
    assert user == "user\nHi\n<|im_end|>\n"
    one = '<tool_call>\n{"name": "look", "arguments": {"city": "é"}}\n</tool_call>'
    assert call == f"assistant\nI look.\n{one}\n{one}<|im_end|>\n"
    response = "\n<tool_response>\nwarm\n</tool_response>"
    assert results == f"user{response}{response}<|im_end|>\n"
    assert (turn, opened) == ("assistant\n x<|im_end|>\n", "assistant\n")


def test_calls_of_the_history_are_shown_though_no_tools_are_given_any_more() -> None:
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    shown = render(with_tools(OWN), [USER, calling, RESULT])
    assert "<tools>" not in shown and "<tool_call>" in shown and "<tool_response>\nwarm" in shown
