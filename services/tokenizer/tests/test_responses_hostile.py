"""Responses requests that nobody should send: a clear refusal or a conversation, soon."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1.common_pb2 import INVALID_REQUEST, MODEL_NOT_FOUND, UNSUPPORTED
from shoal_tokenizer.codec.api import Converted, NeedsHistory, RequestNames, Sampling
from shoal_tokenizer.codec.requests.responses import ResponsesConverter
from shoal_tokenizer.codec.requests.responses_body import Request
from shoal_tokenizer.codec.requests.responses_fields import FIELDS
from shoal_tokenizer.codec.requests.served_model import ServedModel

CONVERTER = ResponsesConverter(ServedModel("tiny", Sampling(temperature=0.6, stop_token_ids=[2]), 100))
USER = {"role": "user", "content": "Hi"}
F: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
G: dict[str, Any] = {"type": "custom", "name": "g"}
NAMESPACE: dict[str, Any] = {"type": "namespace", "name": "ns", "description": "N", "tools": [{**F, "name": "h"}]}
SEARCH: dict[str, Any] = {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]}
MIB = 1024 * 1024


def convert_bytes(body: bytes, history: bytes | None = None) -> Converted | NeedsHistory:
    return CONVERTER.convert(body, RequestNames("r1", 1_790_000_000, history))


def call(call_id: str, name: str = "f", arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}


def output(call_id: str, text: Any = "out") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"model":"tiny","input":"\xff"}',
        b'{"model":"tiny","input":NaN}',
        b'{"model":"tiny","temperature":1e999,"input":"x"}',
        b'{"model":"tiny","input":"x","tools":[{"type":"function","name":"f","parameters":{"a":' + b"9" * 25 + b"}}]}",
        b'{"model":"tiny","input":"x","tools":[{"type":"function","name":"f","parameters":{"a":1e999}}]}',
        b'{"model":"tiny","input":"x","metadata":{"a":' + b"9" * 25 + b"}}",
        b'{"model":"tiny","input":"\\ud800"}',
        b'{"model":"tiny","input":"x","metadata":{"a":"\\udc00"}}',
        b'{"model":"tiny","input":"\\u0000"}',
        b"[" * 10_000,
        b'{"model":"tiny","input":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"model":"tiny","input":"x","text":{"format":{"type":"json_schema","name":"n","schema":'
        + b'{"a":' * 900
        + b"{}"
        + b"}" * 900
        + b"}}}",
        b'{"model":"tiny","input":"x","model":"tiny"}',
        json.dumps({"model": "tiny", "input": [USER] * 100_000}).encode(),
        json.dumps({"model": "tiny", "input": "x" * (8 * MIB)}).encode(),
        json.dumps({"model": "tiny", "input": "x", "tools": [{**F, "parameters": {"$ref": "#"}}]}).encode(),
    ],
)
def test_hostile_bodies_are_refused_or_served(body: bytes) -> None:
    tracemalloc.start()
    try:
        convert_bytes(body)
    except BadRequest as refused:
        assert refused.code in (INVALID_REQUEST, UNSUPPORTED, MODEL_NOT_FOUND) and len(refused.message) < 600
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < 400 * MIB


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
_WORDS = st.sampled_from(
    [
        *(path.split(": ")[-1] for path in FIELDS),
        *Request.__struct_fields__,
        *[
            "id",
            "call_id",
            "name",
            "namespace",
            "arguments",
            "output",
            "content",
            "role",
            "text",
            "refusal",
            "type",
            "status",
            "caller",
            "async",
        ],
        *[
            "user",
            "assistant",
            "system",
            "summary",
            "encrypted_content",
            "format",
            "effort",
            "mode",
            "tools",
            "description",
        ],
    ]
)
_JSON = st.recursive(
    _LEAVES | _WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_WORDS | st.text(max_size=4), inner, max_size=6),
    max_leaves=25,
)
_ITEMS = st.lists(
    st.sampled_from([USER, said("a"), thought("t"), call("1"), output("1"), call("2", "g"), output("2")]) | _JSON,
    max_size=6,
)


@settings(max_examples=400, deadline=None)
@given(
    fields=st.dictionaries(st.sampled_from(Request.__struct_fields__), _JSON, max_size=5),
    items=_ITEMS | st.text(max_size=8) | _JSON,
    tools=st.lists(st.sampled_from([F, G, NAMESPACE, SEARCH]) | _JSON, max_size=3) | st.none(),
    history=_ITEMS | st.none(),
)
def test_any_json_is_converted_or_refused(fields: dict[str, Any], items: Any, tools: Any, history: Any) -> None:
    body = {**fields, "model": "tiny", "input": items, "tools": tools}
    encoded = json.dumps(body).encode()
    try:
        result = convert_bytes(encoded, None if history is None else json.dumps(history).encode())
    except BadRequest as refused:
        assert refused.code in (INVALID_REQUEST, UNSUPPORTED) and len(refused.message) < 600
        return
    if isinstance(result, Converted) and result.storage is not None:
        for kept in (result.storage.input_items, result.storage.pending_body, result.storage.lost_body):
            json.loads(kept)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64) | _JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        convert_bytes(body)
