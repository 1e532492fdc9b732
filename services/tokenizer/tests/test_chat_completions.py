import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1 import common_pb2 as pb
from shoal_tokenizer.codec.api import Api, Converted, RequestNames, Sampling
from shoal_tokenizer.codec.requests.chat_completions import ChatCompletionsConverter

DEFAULTS = Sampling(temperature=0.6, top_k=20, stop_token_ids=[0, 2])
CONVERTER = ChatCompletionsConverter("tiny", DEFAULTS, vocabulary_size=100)
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def convert(**fields: Any) -> Converted:
    return convert_raw(json.dumps({"model": "tiny", "messages": [USER]} | fields).encode())


def convert_raw(body: bytes) -> Converted:
    return CONVERTER.convert(body, RequestNames("r1", 1700000000))


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        convert(**fields)
    return caught.value


def test_the_smallest_request() -> None:
    converted = convert()
    assert converted.conversation.messages == [USER]
    assert converted.sampling == DEFAULTS
    shape = converted.shape
    assert (shape.api, shape.response_id, shape.created_s) == (Api.CHAT_COMPLETIONS, "chatcmpl-r1", 1700000000)
    assert not shape.is_stream and not shape.has_usage_event and not converted.is_agent


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


def test_content_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = convert(messages=[{"role": "developer", "content": parts}, USER]).conversation.messages
    assert messages == [{"role": "system", "content": "a\nb"}, USER]


def test_tool_history_reads_as_templates_expect_it() -> None:
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []}
    result = {"role": "tool", "tool_call_id": "c1", "content": "seen"}
    converted = convert(messages=[USER, answer, result], tools=[TOOL])
    assert converted.is_agent
    assert converted.conversation.tools == [TOOL]
    assert converted.conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == {"at": 1}
    assert converted.conversation.messages[2] == result
    assert convert(tools=[TOOL], tool_choice="none").conversation.tools is None


def test_labels_for_the_providers_books_change_nothing() -> None:
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}
    assert convert(**ignored) == convert()


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
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"temprature": 1}, "temprature"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
]


@pytest.mark.parametrize(("fields", "param"), INVALID, ids=[f"{p}-{n}" for n, (_, p) in enumerate(INVALID)])
def test_what_the_caller_must_change_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.code, error.param) == (pb.INVALID_REQUEST, param)
    assert "`" not in error.message and "$" not in error.message


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": "x", "refusal": "no"}]}, "messages[0].refusal"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"functions": []}, "functions"),
]  # fmt: skip


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


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "model",
    "messages",
    "max_tokens",
    "stop",
    "stream",
    "stream_options",
    "tools",
    "logit_bias",
    "n",
    "tool_choice",
]


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), anything, max_size=3), anything)
def test_no_body_raises_anything_else(fields: dict[str, Any], message: Any) -> None:
    body = {"model": "tiny", "messages": [message]} | fields
    with contextlib.suppress(BadRequest):
        convert_raw(json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"))
