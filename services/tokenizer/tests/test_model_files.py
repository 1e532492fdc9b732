import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1 import common_pb2 as pb
from shoal_tokenizer.codec.api import Api, RequestNames
from shoal_tokenizer.codec.chat_template.renderer import ModelMismatch
from shoal_tokenizer.codec.conversation import Conversation
from shoal_tokenizer.model_files import load_codec, locate
from shoal_tokenizer.model_folder import ModelFilesInvalid

MESSAGES = [
    {"role": "system", "content": " Rules.\n"},
    {"role": "user", "content": "Hello  你好 <|im_end"},
    {"role": "assistant", "content": "the quick\n\nfox"},
    {"role": "user", "content": "\n"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}]
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('No system role!') }}{% endif %}"
    "{{ '[INST] ' + m.content | trim + ' [/INST]' if m.role == 'user' else m.content | trim + eos_token }}{% endfor %}"
)


def test_tools_are_refused_where_the_template_has_none(model_folder: Path) -> None:
    codec = load_codec(model_folder, "tiny", 0)
    user = {"role": "user", "content": "hi"}
    for conversation in (
        Conversation([user], TOOLS),
        Conversation([user, {"role": "tool", "content": "x", "tool_call_id": "c"}]),
    ):
        with pytest.raises(BadRequest) as caught:
            codec.renderer.render(conversation, 0)
        assert caught.value.code == pb.UNSUPPORTED


def test_a_refusal_of_the_template_reaches_the_caller(folder_with: Callable[..., Path]) -> None:
    codec = load_codec(folder_with(ALTERNATING), "m", 0)
    assert codec.renderer.render(Conversation([MESSAGES[1]]), 0).segments[0] == ("<|endoftext|>", True)
    with pytest.raises(BadRequest) as caught:
        codec.renderer.render(Conversation([MESSAGES[0]]), 0)
    assert caught.value.code == pb.UNSUPPORTED and caught.value.param == "messages[0].role"


@pytest.mark.parametrize("template", ["{{ raise_exception('never') }}", "{{ messages[0].content[0].text.x }}"])
def test_a_template_that_takes_no_conversation_stops_the_start(folder_with: Callable[..., Path], template: str) -> None:
    with pytest.raises(ModelMismatch):
        load_codec(folder_with(template), "m", 0)


def test_a_template_whose_control_tokens_would_be_lost_stops_the_start(folder_with: Callable[..., Path]) -> None:
    with pytest.raises(ModelMismatch):
        load_codec(folder_with("{{ '<|im_start|>%s' | format(messages[0].content) }}"), "m", 0)


def test_missing_files_are_named(tmp_path: Path, folder_with: Callable[..., Path]) -> None:
    with pytest.raises(ModelFilesInvalid, match=r"tokenizer\.json is missing"):
        load_codec(tmp_path, "m", 0)
    with pytest.raises(ModelFilesInvalid, match="no chat template"):
        load_codec(folder_with("", chat_template=None), "m", 0)
    with pytest.raises(ModelFilesInvalid, match="not a folder"):
        locate(str(tmp_path / "absent"))


def test_defaults_and_stop_tokens_come_from_the_models_files(
    folder_with: Callable[..., Path], model_folder: Path
) -> None:
    folder = folder_with("{{ messages[0].content }}")
    body = json.dumps({"model": "m", "messages": [MESSAGES[1]]}).encode()

    def sampling() -> object:
        converter = load_codec(folder, "m", 0).converters[Api.CHAT_COMPLETIONS]
        return converter.convert(body, RequestNames("r", 0)).sampling

    both = sampling()
    assert (both.temperature, both.top_k, both.top_p, both.stop_token_ids) == (0.6, 20, None, [0, 2])  # type: ignore[attr-defined]
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    only_config = sampling()
    assert (only_config.temperature, only_config.stop_token_ids) == (None, [1, 2])  # type: ignore[attr-defined]


def test_the_date_in_a_prompt_is_the_requests_own(folder_with: Callable[..., Path]) -> None:
    codec = load_codec(folder_with("{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}"), "m", 0)
    rendered = codec.renderer.render(Conversation([{"role": "user", "content": "x"}]), 1700000000)
    assert rendered.segments == [("2023-11-14 x", False)]


def test_what_no_context_of_the_model_holds_is_refused_before_it_is_encoded(folder_with: Callable[..., Path]) -> None:
    folder = folder_with("{{ messages[0].content }}")
    too_long = [("x " * 100_000, False)]
    load_codec(folder, "m", 0).encoder.encode(too_long)  # nobody knows how long the context is
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')
    with pytest.raises(BadRequest, match="64 tokens"):
        load_codec(folder, "m", 0).encoder.encode(too_long)
