"""Requests of the Responses API as the tests of its converter make them, and what they become."""

import json
from typing import Any

import pytest

from shoal_contracts.errors import BadRequest
from shoal_tokenizer.codec.api import Converted, NeedsHistory, RequestNames, Sampling
from shoal_tokenizer.codec.conversation import Conversation
from shoal_tokenizer.codec.requests.responses import ResponsesConverter
from shoal_tokenizer.codec.requests.served_model import ServedModel

CONVERTER = ResponsesConverter(ServedModel("tiny", Sampling(temperature=0.6, stop_token_ids=[2]), 100))
F: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
G: dict[str, Any] = {"type": "custom", "name": "g"}
NAMESPACE: dict[str, Any] = {"type": "namespace", "name": "ns", "description": "N", "tools": [{**F, "name": "h"}]}
SEARCH: dict[str, Any] = {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]}


def convert_bytes(body: bytes, history: bytes | None = None) -> Converted | NeedsHistory:
    return CONVERTER.convert(body, RequestNames("r1", 1_790_000_000, history))


def convert(history: list[Any] | None = None, **fields: Any) -> Converted:
    body = {"model": "tiny", "input": "Hi", **fields}
    converted = convert_bytes(json.dumps(body).encode(), None if history is None else json.dumps(history).encode())
    assert isinstance(converted, Converted)
    return converted


def conversation(**fields: Any) -> Conversation:
    prompt = convert(**fields).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def refusal(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        convert(**fields)
    return refused.value
