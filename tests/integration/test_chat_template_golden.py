"""Prompts with tools, thinking and answers that go on equal ``apply_chat_template``, also their ids."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from shoal_testkit.chat_models import CHAT_MODELS
from shoal_tokenizer.codec.api import Codec
from shoal_tokenizer.codec.conversation import Conversation, Effort, Thinking
from shoal_tokenizer.model_files import load_codec

SYSTEM = {"role": "system", "content": " Rules.\n"}
USER = {"role": "user", "content": "Hello  你好 <|im_end"}
TURN = {"role": "assistant", "content": "the quick\n\nfox"}
REASONED = {**TURN, "reasoning_content": "First.\n\nThen."}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": "é", "n": [1, {"a": None}]}}}
RESULT = {"role": "tool", "content": "seen </tool_response", "tool_call_id": "c", "name": "look"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "d é",
            "parameters": {"type": "object", "properties": {"at": {"type": "string", "enum": ["é"]}}},
        },
    }
]
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SPEAKING = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
PLAIN: list[list[dict[str, Any]]] = [[USER], [SYSTEM, USER], [USER, TURN, USER], [SYSTEM, USER, REASONED, USER]]
CALLS = [[USER, CALLING, RESULT], [SYSTEM, USER, SPEAKING, RESULT, REASONED, USER, CALLING, RESULT]]
VARIABLES = {
    "qwen3": [(Thinking(False), {"enable_thinking": False}), (Thinking(True), {"enable_thinking": True})],
    "spelled": [(Thinking(True, Effort.LOW), {"thinking": True, "reasoning_effort": "low"})],
}


@pytest.fixture(scope="module", params=CHAT_MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Codec, Any]:
    folder = CHAT_MODELS[request.param].write(tmp_path_factory.mktemp(request.param))
    return request.param, load_codec(folder, "m", 0), AutoTokenizer.from_pretrained(folder)


def test_prompts_equal_apply_chat_template(served: tuple[str, Codec, Any]) -> None:
    name, codec, reference = served
    cases = [(messages, tools) for messages in PLAIN for tools in (None, TOOLS)] + [(m, TOOLS) for m in CALLS]
    for messages, tools in cases:
        if name == "r1" and tools:
            continue
        for thinking, variables in [(Thinking(), {}), *VARIABLES.get(name, [])]:
            rendered = codec.renderer.render(Conversation(messages, tools, thinking=thinking), 0)
            expected = reference.apply_chat_template(
                messages, tools, add_generation_prompt=True, strftime_now=lambda _form: "01 Jan 1970", **variables
            )["input_ids"]
            assert codec.encoder.encode(rendered.segments) == list(expected)


@pytest.mark.parametrize("text", ["The answer", "is ", " x\n", "a\n\nb", "<|im_start|>"])
def test_an_answer_that_goes_on_equals_continue_final_message(served: tuple[str, Codec, Any], text: str) -> None:
    _name, codec, reference = served
    messages = [SYSTEM, USER, {"role": "assistant", "content": text}]
    rendered = codec.renderer.render(Conversation(messages, is_continued=True), 0)
    expected = reference.apply_chat_template(
        messages, continue_final_message=True, tokenize=False, strftime_now=lambda _form: "01 Jan 1970"
    )
    assert "".join(part for part, _ in rendered.segments) == expected
