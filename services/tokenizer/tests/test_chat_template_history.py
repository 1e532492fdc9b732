"""What a model generated is rendered again as it was: the next turn begins with the ids of this one and its answer."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from shoal_testkit.chat_models import CHAT_MODELS
from shoal_tokenizer.codec.api import (
    AnswerShape,
    Api,
    CallArguments,
    CallBegin,
    Codec,
    Part,
    Reasoning,
    Text,
)
from shoal_tokenizer.codec.conversation import Conversation
from shoal_tokenizer.model_files import load_codec

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}},
        },
    }
    for name in ("look", "find")
]
HERMES = (
    '<tool_call>\n{"name": "look", "arguments": {"city": "Saint-Étienne\\n\\"x\\"", "days": [1, {"a": null}]}}\n'
    "</tool_call>"
)
CODER = (
    "<tool_call>\n<function=look>\n<parameter=city>\nSaint-Étienne\n<b>\n</parameter>\n<parameter=days>\n"
    '[1, {"a": null}]\n</parameter>\n</function>\n</tool_call>'
)
LLAMA = '{"name": "look", "parameters": {"city": "Saint-Étienne", "days": [1]}}'
THOUGHT = "<think>\nI look\n\nfirst.\n</think>\n\n"
# By model: what it generates before its end-of-turn token, turn by turn.
ANSWERS: dict[str, Sequence[str]] = {
    "qwen3": (f"{THOUGHT}I look.\n{HERMES}", f"{THOUGHT}{HERMES}\n{HERMES}", f"{THOUGHT}It is warm."),
    "qwen3_coder": (f"I look.\n{CODER}", CODER, f"{CODER}\n{CODER}", "It is warm."),
    "llama3": (LLAMA, LLAMA, "It is warm."),
    "spelled": (f"I look.\n{HERMES}", f"{HERMES}\n{HERMES}", "It is warm."),
    "r1": ("It is warm.",),
}


@pytest.fixture(scope="session")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Codec]:
    folder = tmp_path_factory.mktemp("chat_models")
    return {name: load_codec(model.write(folder / name), name, 16) for name, model in CHAT_MODELS.items()}


def as_message(parts: Sequence[Part], turn: int) -> dict[str, Any]:
    """The answer as a client gives it back."""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(p.text for p in parts if isinstance(p, Text))}
    if thought := "".join(p.text for p in parts if isinstance(p, Reasoning)):
        message["reasoning_content"] = thought
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            calls.append({"name": part.name, "arguments": ""})
        elif isinstance(part, CallArguments):
            calls[-1]["arguments"] += part.text
    if calls:
        message["tool_calls"] = [
            {"id": f"c{turn}{n}", "type": "function", "function": {**c, "arguments": json.loads(c["arguments"])}}
            for n, c in enumerate(calls)
        ]
    return message


def answered(messages: list[dict[str, Any]], message: dict[str, Any]) -> list[dict[str, Any]]:
    results = [
        {"role": "tool", "content": "wave " * 50, "tool_call_id": call["id"], "name": "look"}
        for call in message.get("tool_calls", ())
    ]
    return [*messages, message, *(results or [{"role": "user", "content": "And then?"}])]


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_the_next_prompt_begins_with_this_one_and_its_answer(codecs: dict[str, Codec], name: str) -> None:
    codec, tokenizer = codecs[name], CHAT_MODELS[name].tokenizer()
    tools = None if name == "r1" else TOOLS
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind. " * 100},
        {"role": "user", "content": "How warm is it? " * 100},
    ]
    eos = tokenizer.token_to_id(CHAT_MODELS[name].eos)
    for turn, answer in enumerate(ANSWERS[name]):
        rendered = codec.renderer.render(Conversation(messages, tools), 0)
        shape = AnswerShape(
            Api.CHAT_COMPLETIONS,
            "r",
            0,
            "m",
            True,
            has_tools=tools is not None,
            text_parameters=rendered.text_parameters,
        )
        ids = codec.encoder.encode(rendered.segments)
        generated = [*tokenizer.encode(answer).ids, eos]
        parser = codec.new_parser(shape)
        parts = [part for i in generated[:-1] for part in parser.push([i], ()).parts] + parser.close().parts
        messages = answered(messages, as_message(parts, turn))
        following = codec.encoder.encode(codec.renderer.render(Conversation(messages, tools), 0).segments)
        shared = shared_prefix([*ids, *generated], following)
        if name in ("qwen3", "r1") and turn == len(ANSWERS[name]) - 1:
            # These templates drop the reasoning of earlier questions by themselves, or its opened mark.
            assert shared >= 0.95 * len(ids) if name == "r1" else shared > 0.3 * len(ids)
        else:
            assert shared == len(ids) + len(generated), f"turn {turn} differs"


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
