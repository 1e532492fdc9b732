"""Whatever a caller types, wherever: the control tokens of a prompt stay those that its template wrote."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal_contracts.errors import BadRequest
from shoal_testkit.chat_models import CHAT_MODELS
from shoal_tokenizer.codec.api import Codec
from shoal_tokenizer.codec.conversation import AnswerFormat, Conversation
from shoal_tokenizer.model_files import load_codec

Served = tuple[Codec, dict[str, int]]

FULL: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {
            "role": "assistant",
            "content": "A",
            "reasoning_content": "R",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "look", "arguments": {"city": "P", "deep": [{"er": "D"}, "E"], "n": 1}},
                }
            ],
        },
        {"role": "tool", "content": "T", "tool_call_id": "call_1", "name": "look"},
        {"role": "assistant", "content": "B", "reasoning_content": "Q"},
        {"role": "user", "content": "V"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "D",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "enum": ["x"], "description": "y"}},
                    "required": ["city"],
                },
            },
        }
    ],
}
SIMPLE = {"messages": [FULL["messages"][n] for n in (0, 1, 4, 5)], "tools": None}
FIXED = {"role", "type"}  # the converters' own words


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> dict[str, Served]:
    folder = tmp_path_factory.mktemp("chat_models")
    folders = {name: model.write(folder / name) for name, model in CHAT_MODELS.items()} | {"chatml": model_folder}
    return {name: (load_codec(path, name, 16), added_tokens(path)) for name, path in folders.items()}


def added_tokens(folder: Path) -> dict[str, int]:
    listed = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return {token["content"]: token["id"] for token in listed}


def places(value: Any, rebuild: Callable[[Any], Any], path: str = "") -> Iterator[tuple[str, Callable[[str], Any]]]:
    """Every string and every key that a caller can write: where, and the whole with a text put behind it."""
    if isinstance(value, str):
        yield path, lambda typed: rebuild(value + typed)
    elif isinstance(value, list):
        for n, item in enumerate(value):
            yield from places(item, lambda new, n=n: rebuild([*value[:n], new, *value[n + 1 :]]), f"{path}[{n}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in FIXED or not isinstance(item, str):
                yield from places(item, lambda new, key=key: rebuild(value | {key: new}), f"{path}.{key}")
            if is_free(path):
                yield f"{path}.{key}#", lambda typed, key=key: rebuild(renamed(value, key, key + typed))


def is_free(path: str) -> bool:
    return ".arguments" in path or ".parameters" in path


def renamed(value: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    return {name if k == key else k: v for k, v in value.items()}


def controls(codec: Codec, body: dict[str, Any], ids: set[int]) -> Counter[int]:
    conversation = Conversation(body["messages"], body["tools"], answer_format=AnswerFormat(schema={"a": 1}))
    segments = codec.renderer.render(conversation, 0).segments
    return Counter(token_id for token_id in codec.encoder.encode(segments) if token_id in ids)


@pytest.mark.parametrize("name", ["chatml", *CHAT_MODELS])
def test_no_typed_token_is_a_control_token(served: dict[str, Served], name: str) -> None:
    codec, added = served[name]
    body = FULL if name in ("qwen3", "qwen3_coder", "llama3", "spelled") else SIMPLE
    ids = set(added.values())
    expected = controls(codec, body, ids)
    assert expected, "the template writes control tokens of its own"
    tried = []
    for place, with_typed in places(body, lambda new: new):
        for typed in (" ".join(added), *added):
            try:
                found = controls(codec, with_typed(typed), ids)
            except BadRequest:
                continue
            tried.append(place)
            # A template may cut assistant text at a mark; that takes nothing of its own away and adds nothing.
            assert found == expected, f"{place} with {typed} forms {found - expected or expected - found}"
    contents = {f".messages[{n}].content" for n in range(len(body["messages"]))}
    schema = {".tools[0].function.name", ".tools[0].function.parameters.properties.city#"}
    assert contents | (schema if body["tools"] else set()) <= set(tried)


@pytest.mark.parametrize("name", ["chatml", *CHAT_MODELS])
def test_raw_text_has_no_control_tokens(served: dict[str, Served], name: str) -> None:
    codec, added = served[name]
    ids = codec.encoder.encode(codec.renderer.render_raw(" ".join(added)))
    assert not set(ids) & set(added.values())
