"""The OpenAPI document of the public APIs, from the structures by which their bodies are read.

It describes what is taken: a field that some API has and this one refuses is there too, so that clients and fuzzers
send it and get the refusal. Answers have the shapes of the APIs themselves, which their own documents describe.
"""

import importlib
import json
from typing import Any

import msgspec

VERSION = "0.0.0"  # as the distributions
BODIES = {  # path below /v1 -> what it is, the module of its structure, whether it may be answered by a stream
    "chat/completions": ("An answer to a conversation, as OpenAI's Chat Completions.", "chat_body", True),
    "completions": ("How a text goes on, as OpenAI's Completions.", "completions", True),
    "responses": ("An answer that can be stored, as OpenAI's Responses.", "responses_body", True),
    "messages": ("An answer to a conversation, as Anthropic's Messages.", "messages_body", True),
    "messages/count_tokens": ("How many tokens a body of Messages has.", "messages_body", False),
}
BY_ID = {  # path below /v1 -> its methods and what they do
    "models": {"get": "The models, in Anthropic's shape where the request has `anthropic-version`."},
    "models/{id}": {"get": "One model; its id may have slashes."},
    "responses/{id}": {"get": "A stored response.", "delete": "Forget it."},
    "responses/{id}/cancel": {"post": "Stop a response that runs in the background."},
    "responses/{id}/input_items": {"get": "What it was asked."},
}
ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
ERROR = {"description": "An error in the shape of the API.", "content": {"application/json": {}}}


def document() -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, (summary, module, is_streamed) in BODIES.items():
        reference = _add_schemas(module, schemas)
        kinds = ("application/json", "text/event-stream") if is_streamed else ("application/json",)
        paths[f"/v1/{path}"] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
                "responses": {
                    "200": {"description": summary, "content": {kind: {} for kind in kinds}},
                    "default": ERROR,
                },
            }
        }
    for path, methods in BY_ID.items():
        paths[f"/v1/{path}"] = {
            method: {
                "summary": summary,
                "parameters": [ID] if "{id}" in path else [],
                "responses": {
                    "200": {"description": summary, "content": {"application/json": {}}},
                    "default": ERROR,
                },
            }
            for method, summary in methods.items()
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Shoal", "version": VERSION, "summary": "Made by `make gen` from the code. Do not edit."},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def openapi_page() -> str:
    return json.dumps(document(), indent=1) + "\n"


def _add_schemas(module: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """The structures of one API under names of their own; returns the reference to that of its body."""
    structure = importlib.import_module(f"shoal_tokenizer.codec.requests.{module}").Request
    (reference,), components = msgspec.json.schema_components(
        [structure], ref_template=f"#/components/schemas/{module}.{{name}}"
    )
    schemas.update({f"{module}.{name}": schema for name, schema in components.items()})
    return dict(reference)
