"""Prompts of our renderer and encoder equal transformers' ``apply_chat_template``, also on the packaged model."""

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from shoal_model import DEFAULT_MODEL, prepare
from shoal_tokenizer.codec.api import Api, Codec, Conversation, RequestNames
from shoal_tokenizer.codec.chat_template.markers import Markers
from shoal_tokenizer.codec.chat_template.renderer import ChatTemplate
from shoal_tokenizer.model_files import load_codec

MESSAGES = [
    {"role": "system", "content": " Rules.\n"},
    {"role": "user", "content": "Hello  你好 <|im_end"},
    {"role": "assistant", "content": "the quick\n\nfox"},
    {"role": "user", "content": "\n"},
]
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
TOOL_MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "seen", "tool_call_id": "c"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN_STYLE = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}"
    "{%- if message.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '\\n<tool_call>\\n' + call.function.name + ' ' }}{{- call.function.arguments | tojson }}{{- '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def write_folder(folder: Path, template: object) -> Path:
    """A tiny byte-level tokenizer with ChatML's special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox user system"] * 9, trainer)
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in ("<tool_call>", "</tool_call>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ids_of(codec: Codec, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
    return codec.encoder.encode(codec.renderer.render(Conversation(messages, tools), 0).segments)


def expected_ids(folder: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return list(tokenizer.apply_chat_template(messages, tools, add_generation_prompt=True)["input_ids"])


@pytest.mark.parametrize("form", ["config", "jinja_file", "named_list"])
def test_prompts_equal_apply_chat_template(tmp_path: Path, form: str) -> None:
    named = [{"name": "default", "template": CHATML}, {"name": "rag", "template": "x"}]
    folder = write_folder(tmp_path / "m", {"config": CHATML, "jinja_file": "ignored", "named_list": named}[form])
    if form == "jinja_file":
        (folder / "chat_template.jinja").write_text(CHATML)
    assert ids_of(load_codec(folder, "m", 0), MESSAGES) == expected_ids(folder, MESSAGES)


def test_tools_are_rendered_where_the_template_has_them(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", QWEN_STYLE)
    codec = load_codec(folder, "m", 0)
    assert ids_of(codec, TOOL_MESSAGES, TOOLS) == expected_ids(folder, TOOL_MESSAGES, TOOLS)


def template_files() -> list[Path]:
    """Chat templates that vLLM ships: written by others, for real models."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return sorted((Path(spec.origin).parent / "transformers_utils" / "chat_templates").glob("*.jinja"))


@pytest.mark.parametrize("path", template_files(), ids=lambda path: path.stem)
def test_templates_of_real_models_render_as_in_transformers(path: Path) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(path.read_text(), tokens, Markers([]))
    for messages in (MESSAGES[:2], MESSAGES[1:2], MESSAGES):
        expected, _ = render_jinja_template(
            [messages], chat_template=path.read_text(), add_generation_prompt=True, **tokens
        )
        assert template.render_text(Conversation(messages), 0) == expected[0]


@pytest.fixture(scope="module")
def default_folder() -> Path:
    """The packaged model, converted once and kept where ``shoal up`` keeps it."""
    return prepare("", Path.home() / ".cache" / "shoal" / "models", lambda _line: None).folder


def test_the_packaged_models_prompts_equal_apply_chat_template(default_folder: Path) -> None:
    codec = load_codec(default_folder, DEFAULT_MODEL, 1)
    tokenizer = AutoTokenizer.from_pretrained(default_folder)
    source = random.Random(1)
    words = [
        "Hello",
        " world",
        "\n\n",
        "  ",
        "123",
        "你好",
        "é",
        "\t",
        "<",
        "|im_end|",
        "def f():\n    return",
        "🦈",
        "'ll",
    ]
    for _ in range(100):
        messages = [
            {"role": role, "content": "".join(source.choices(words, k=source.randrange(1, 30)))}
            for role in source.choices(["system", "user", "assistant"], k=source.randrange(1, 6))
        ]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ids_of(codec, messages) == list(expected)


def test_the_packaged_models_turn_ends_with_its_own_token(default_folder: Path) -> None:
    codec = load_codec(default_folder, DEFAULT_MODEL, 1)
    body = json.dumps({"model": DEFAULT_MODEL, "messages": MESSAGES}).encode()
    converted = codec.converters[Api.CHAT_COMPLETIONS].convert(body, RequestNames("r", 0))
    assert converted.sampling.stop_token_ids == [2]
