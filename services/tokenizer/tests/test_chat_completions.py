"""Chat Completions requests: everything beside messages and tools."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1 import common_pb2 as pb
from shoal_tokenizer.codec.api import Api, Converted, RequestNames, Sampling
from shoal_tokenizer.codec.conversation import AnswerFormat, Conversation, Effort, Thinking
from shoal_tokenizer.codec.requests.chat_body import Request
from shoal_tokenizer.codec.requests.chat_completions import ChatCompletionsConverter
from shoal_tokenizer.codec.requests.chat_fields import FIELDS
from shoal_tokenizer.codec.requests.served_model import ServedModel

DEFAULTS = Sampling(temperature=0.6, top_k=20, stop_token_ids=[0, 2])
CONVERTER = ChatCompletionsConverter(ServedModel("tiny", DEFAULTS, 100))
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}


def convert(**fields: Any) -> Converted:
    return convert_raw(json.dumps({"model": "tiny", "messages": [USER]} | fields).encode())


def convert_raw(body: bytes) -> Converted:
    return CONVERTER.convert(body, RequestNames("r1", 1700000000))


def conversation(**fields: Any) -> Conversation:
    prompt = convert(**fields).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        convert(**fields)
    return caught.value


def test_the_smallest_request() -> None:
    converted = convert()
    assert converted.prompt == Conversation([USER])
    assert converted.sampling == DEFAULTS
    shape = converted.shape
    assert (shape.api, shape.response_id, shape.created_s) == (Api.CHAT_COMPLETIONS, "chatcmpl-r1", 1700000000)
    assert not shape.is_stream and not shape.has_usage_event and not converted.is_agent
    assert converted.notes == () and converted.cache_key is None


def test_more_messages_than_can_be_rendered_in_time_are_refused() -> None:
    error = refused(messages=[USER] * 20_001)
    assert error.param == "messages" and "number of entries must be <= 20000" in error.message


def test_every_sampling_field_is_taken() -> None:
    sampling = convert(
        max_tokens=7, temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=-1, presence_penalty=1, frequency_penalty=-2,
        repetition_penalty=1.1, logprobs=True, top_logprobs=3, logit_bias={"5": -100, "99": 1.5},
    ).sampling  # fmt: skip
    assert sampling == Sampling(
        max_tokens=7, temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=2**63 - 1, presence_penalty=1,
        frequency_penalty=-2, repetition_penalty=1.1, logprobs=3, logit_bias={5: -100, 99: 1.5}, stop_token_ids=[0, 2],
    )  # fmt: skip


def test_ignore_eos_leaves_no_stop_tokens() -> None:
    sampling = convert(ignore_eos=True).sampling
    assert sampling.ignore_eos and sampling.stop_token_ids == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5),
        ({}, None),
    ],
)
def test_both_names_of_the_token_limit(fields: dict[str, int], expected: int | None) -> None:
    assert convert(**fields).sampling.max_tokens == expected


@pytest.mark.parametrize(("stop", "expected"), [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stop_strings(stop: Any, expected: tuple[str, ...]) -> None:
    assert convert(stop=stop).shape.stop_strings == expected


def test_stream_options() -> None:
    shape = convert(stream=True, stream_options={"include_usage": True}).shape
    assert shape.is_stream and shape.has_usage_event
    assert not convert(stream=True, stream_options=None).shape.has_usage_event


def test_labels_for_the_providers_books_change_nothing() -> None:
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}
    assert convert(**ignored) == convert()


def test_the_cache_key_goes_to_the_placement() -> None:
    assert convert(prompt_cache_key="session-1").cache_key == "session-1"


@pytest.mark.parametrize(("top_k", "taken"), [(-1, 100), (0, 100), (5, 5), (None, 20)])
def test_no_limit_of_top_k_is_the_whole_vocabulary_not_the_models_default(top_k: int | None, taken: int) -> None:
    assert convert(top_k=top_k).sampling.top_k == taken


def test_stop_tokens_are_taken_beside_the_models_own() -> None:
    assert convert(stop_token_ids=[5, 2]).sampling.stop_token_ids == [0, 2, 5]
    assert convert(stop_token_ids=[5], ignore_eos=True).sampling.stop_token_ids == [5]


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, Thinking()),
        ({"reasoning_effort": "none"}, Thinking(False)),
        ({"reasoning_effort": "minimal"}, Thinking(True, Effort.MINIMAL)),
        ({"reasoning_effort": "xhigh"}, Thinking(True, Effort.XHIGH)),
        ({"reasoning_effort": "ultra"}, Thinking(True, Effort.MAX)),
        ({"thinking": {"type": "enabled"}}, Thinking(True)),
        ({"thinking": {"type": "disabled"}}, Thinking(False)),
        ({"thinking": {"type": "adaptive"}}, Thinking()),
        ({"thinking": {"type": "adaptive"}, "reasoning_effort": "low"}, Thinking(True, Effort.LOW)),
        ({"enable_thinking": False}, Thinking(False)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Thinking(False)),
        ({"chat_template_kwargs": {"thinking": True, "reasoning_effort": "high"}}, Thinking(True, Effort.HIGH)),
        ({"thinking": {"type": "disabled"}, "enable_thinking": False}, Thinking(False)),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, Thinking(False)),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, Thinking(True)),
    ],
)
def test_all_ways_to_ask_for_thinking(fields: dict[str, Any], thinking: Thinking) -> None:
    assert conversation(**fields).thinking == thinking


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, "reasoning_effort: thinking is off"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "reasoning_effort: thinking is on"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"verbosity": "low"}, "verbosity"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"messages": [{**USER, "name": "bob"}]}, "messages: 'name'"),
    ],
)
def test_what_has_no_effect_is_noted(fields: dict[str, Any], note: str) -> None:
    (told,) = convert(**fields).notes
    assert told.startswith(note)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, AnswerFormat()),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, AnswerFormat(schema=SCHEMA)),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True, "description": "d"}},
            AnswerFormat(schema=SCHEMA),
        ),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, AnswerFormat()),
        ({"type": "regex", "regex": "a+"}, AnswerFormat(regex="a+")),
    ],
)
def test_formats_of_the_answer(asked: dict[str, Any], taken: AnswerFormat | None) -> None:
    assert conversation(response_format=asked).answer_format == taken


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [USER | {"extra": 1}]}, "messages[0].extra"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"model": 5}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"100": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"seed": 2**63}, "seed"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"top_k": -2}, "top_k"),
    ({"stop_token_ids": [100]}, "stop_token_ids"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"thinking": {"type": "on"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}, "enable_thinking": False}, "thinking"),
    ({"chat_template_kwargs": {"zap": 1}}, "chat_template_kwargs.zap"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "regex", "regex": "(a"}}, "response_format.regex"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"prompt_cache_key": "x" * 1025}, "prompt_cache_key"),
    ({"temprature": 1}, "temprature"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
]


@pytest.mark.parametrize(("fields", "param"), INVALID, ids=[f"{p}-{n}" for n, (_, p) in enumerate(INVALID)])
def test_what_the_caller_must_change_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.code, error.param) == (pb.INVALID_REQUEST, param)
    assert "`" not in error.message and "$" not in error.message


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"n": 9}, "n"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"functions": []}, "functions"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"guided_json": {}}, "guided_json"),
]


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED, ids=[param for _, param in UNSUPPORTED])
def test_what_is_not_offered_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.code, error.param) == (pb.UNSUPPORTED, param)


def test_an_unknown_model_is_named() -> None:
    error = refused(model="gpt-9")
    assert (error.code, error.param) == (pb.MODEL_NOT_FOUND, "model")
    assert "gpt-9" in error.message and "tiny" in error.message


def test_messages_read_like_sentences() -> None:
    assert (
        refused(temperature="hot").message
        == "Invalid type for 'temperature': expected a number or null, but got a string."
    )
    assert refused(max_tokens=0).message == "Invalid 'max_tokens': the value must be >= 1."
    assert refused(messages=[]).message == "Invalid 'messages': the number of entries must be >= 1."
    assert refused(reasoning_effort="much").message == (
        "Invalid value: 'much'. Supported values are: "
        "'high', 'low', 'max', 'medium', 'minimal', 'none', 'ultra', 'xhigh'."
    )
    assert refused(functions=[]).message == "'functions' is not supported here. Use 'tools' and 'tool_choice'."
    assert refused(zap=1).message == "Unrecognized request argument supplied: zap"
    assert refused(messages=[{"role": "wiz", "content": ""}]).message == (
        "Invalid value: 'wiz'. Supported values are: 'system', 'developer', 'user', 'assistant', 'tool'."
    )


BROKEN = {
    "empty": b"",
    "cut": b'{"model": "tiny"',
    "no_object": b"[]",
    "not_utf8": b'{"model": "\xff"}',
    "byte_order_mark": b"\xef\xbb\xbf{}",
    "nan": b'{"temperature": NaN}',
    "more_after": b'{"model":"tiny","messages":[{"role":"user","content":"x"}]} x',
    "lone_surrogate": b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}',
    "encoded_surrogate": b'{"model":"tiny","messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
    "deep": b'{"model":"tiny","messages":[],"audio":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep_arguments": json.dumps(
        {
            "model": "tiny",
            "messages": [
                {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[" * 9000}}]}
            ],
        }
    ).encode(),
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
def test_a_body_that_is_no_json_is_the_callers_fault(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        convert_raw(body)
    assert caught.value.code == pb.INVALID_REQUEST


WORDS = st.sampled_from(
    [
        *(path.split(": ")[-1].split(".")[-1] for path in FIELDS),
        *Request.__struct_fields__,
        *("role", "content", "type", "text", "id", "name", "arguments", "input", "function", "custom", "parameters"),
        *("json_schema", "schema", "strict", "allowed_tools", "mode", "tools", "format", "grammar", "syntax", "lark"),
        *("c1", "look", "{}"),
    ]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | WORDS, inner, max_size=4),
    max_leaves=20,
)
MESSAGES = st.lists(
    st.sampled_from(
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "seen"},
            {"role": "assistant", "content": "x", "prefix": True},
        ]
    )
    | ANYTHING,
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(Request.__struct_fields__), ANYTHING, max_size=4), MESSAGES)
def test_any_json_is_converted_or_refused(fields: dict[str, Any], messages: list[Any]) -> None:
    body = {**fields, "model": "tiny", "messages": messages}
    with contextlib.suppress(BadRequest):
        assert isinstance(convert_raw(json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")), Converted)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64) | ANYTHING.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        convert_raw(body)
