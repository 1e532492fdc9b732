"""Responses requests: everything beside input and tools, and the table of all fields."""

from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses import ResponseIncludable, response_create_params
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.tool_param import ToolParam

from shoal_contracts.v1.common_pb2 import MODEL_NOT_FOUND, UNSUPPORTED
from shoal_tokenizer.codec.api import Sampling
from shoal_tokenizer.codec.conversation import (
    AnswerFormat,
    Effort,
    Thinking,
)
from shoal_tokenizer.codec.requests.fields import Verdict
from shoal_tokenizer.codec.requests.responses_body import Request
from shoal_tokenizer.codec.requests.responses_fields import FIELDS

from .responses_asked import conversation, convert, refusal


def test_sampling() -> None:
    asked = convert(max_output_tokens=7, temperature=0, top_p=0.5).sampling
    assert asked == Sampling(max_tokens=7, temperature=0, top_p=0.5, stop_token_ids=[2])
    assert convert().sampling.temperature == 0.6 and convert().sampling.logprobs is None
    shown = convert(include=["message.output_text.logprobs"], top_logprobs=3)
    assert (shown.sampling.logprobs, shown.shape.has_logprobs, shown.shape.top_logprobs) == (3, True, 3)


@pytest.mark.parametrize(
    ("effort", "thinking"),
    [(None, Thinking()), ("none", Thinking(is_on=False))]
    + [(effort.value, Thinking(is_on=True, effort=effort)) for effort in Effort],
)
def test_effort(effort: str | None, thinking: Thinking) -> None:
    assert conversation(reasoning={"effort": effort}).thinking == thinking


def test_answer_formats() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    assert conversation(text={"format": schema}).answer_format == AnswerFormat(schema={"type": "object"})
    assert conversation(text={"format": {"type": "json_object"}}).answer_format == AnswerFormat()
    assert conversation(text={"format": {"type": "text"}}).answer_format is None
    assert refusal(text={"format": {"type": "grammar"}}).param == "text.format.type"
    assert refusal(text={"format": {**schema, "name": "a b"}}).param == "text.format.name"


def test_what_has_no_effect_is_told() -> None:
    asked: dict[str, Any] = {
        "reasoning": {"summary": "auto", "context": "all_turns", "mode": "pro"},
        "text": {"verbosity": "low"},
        "service_tier": "flex",
        "truncation": "auto",
        "max_tool_calls": 3,
        "top_logprobs": 2,
    }
    told = [note.split(":")[0] for note in convert(**asked).notes]
    assert sorted(told) == sorted(
        ["reasoning.summary", "reasoning.context", "reasoning.mode", "text.verbosity", *list(asked)[2:]]
    )
    assert convert(reasoning={"effort": "low"}, text={"verbosity": "medium"}).notes == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": False, "background": True}, "background"),
        ({"stream_options": {}}, "stream_options"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["magic"]}, "include[0]"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"stop": ["x"]}, "stop"),
        ({"messages": []}, "messages"),
    ],
)
def test_settings_that_cannot_be_honoured(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


@pytest.mark.parametrize(
    "name",
    [n for n, e in FIELDS.items() if e.verdict is Verdict.REFUSED and "." not in n and "[" not in n and ":" not in n],
)
def test_refused_fields_are_refused_by_the_table(name: str) -> None:
    error = refusal(**{name: {}})
    assert (error.code, error.param) == (UNSUPPORTED, name) and FIELDS[name].note in error.message


def test_another_model_is_not_found() -> None:
    error = refusal(model="other")
    assert (error.code, error.param) == (MODEL_NOT_FOUND, "model")


def _kinds(union: Any) -> set[str]:
    found: set[str] = set()
    for member in get_args(union):
        hints = get_type_hints(member) if isinstance(member, type) else {}
        found |= set(get_args(hints["type"])) if "type" in hints else _kinds(member)
    return {kind for kind in found if isinstance(kind, str)}


def test_every_field_and_kind_of_the_sdk_has_a_verdict() -> None:
    base = get_type_hints(response_create_params.ResponseCreateParamsBase)
    assert {*base, "stream"} <= FIELDS.keys()
    assert set(Request.__struct_fields__) == {name for name in FIELDS if not {".", "[", ":"} & set(name)}
    assert {f"input[].type: {kind}" for kind in _kinds(ResponseInputItemParam)} <= FIELDS.keys()
    assert {f"tools[].type: {kind}" for kind in _kinds(ToolParam)} <= FIELDS.keys()
    assert {f"tool_choice.type: {kind}" for kind in _kinds(response_create_params.ToolChoice)} <= FIELDS.keys()
    assert {f"include[]: {value}" for value in get_args(ResponseIncludable)} <= FIELDS.keys()
