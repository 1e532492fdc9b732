"""Every field that an official SDK can send has a verdict, and so has every field that a converter knows."""

import types
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from shoal_tokenizer.codec.requests import (
    chat_body,
    chat_fields,
    completions,
    messages_body,
    messages_fields,
    responses_body,
    responses_fields,
)
from shoal_tokenizer.codec.requests.fields import FieldTable, Verdict

TABLES = {
    "chat": (chat_fields.FIELDS, chat_body.Request, chat_params),
    "completions": (completions.FIELDS, completions.Request, completion_create_params),
    "responses": (responses_fields.FIELDS, responses_body.Request, response_create_params),
    "messages": (messages_fields.FIELDS, messages_body.Request, None),
}


def fields_of(module: types.ModuleType) -> set[str]:
    """Of every form of the call that creates something."""
    names: set[str] = set()
    for name, kind in vars(module).items():
        if "CreateParams" in name and hasattr(kind, "__total__") and name.endswith(("Base", "Streaming")):
            names |= set(kind.__annotations__)
    return names


def top(table: FieldTable) -> set[str]:
    return {name for name in table if not any(mark in name for mark in (".", "[", ": "))}


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_of_what_the_converter_knows(name: str) -> None:
    table, structure, _module = TABLES[name]
    names: Any = structure.__struct_encode_fields__
    assert set(names) == top(table)


@pytest.mark.parametrize("name", ["chat", "completions", "responses"])
def test_whatever_the_sdk_can_send_has_a_verdict(name: str) -> None:
    table, _structure, module = TABLES[name]
    assert module is not None
    sdk = fields_of(module)
    assert len(sdk) > 10
    assert sdk <= top(table)


@pytest.mark.parametrize("name", TABLES)
def test_whoever_is_told_no_is_told_why_or_what_instead(name: str) -> None:
    table, _structure, _module = TABLES[name]
    assert [field for field, entry in table.items() if entry.verdict is not Verdict.HONOURED and not entry.note] == []
