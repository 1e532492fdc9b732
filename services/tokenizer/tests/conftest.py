"""A tiny byte-level tokenizer with ChatML, made anew for the session: no file of a real model is needed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from shoal_testkit.deepseek_tokenizer import write_v4, write_v41_stand_in
from shoal_tokenizer.codec.api import AnswerShape, Api, Codec
from shoal_tokenizer.model_files import load_codec

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the stop string stops the stopping",
    "user system 你好",
] * 20


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return tokenizer


def write_folder(folder: Path, template: str, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "chat_template": template,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    generation = {"eos_token_id": [0, 2], "temperature": 0.6, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), CHATML)


@pytest.fixture
def folder_with(tmp_path: Path) -> Callable[..., Path]:
    """``folder_with(template, **tokenizer_config)`` writes a model folder."""
    return lambda template, **config: write_folder(tmp_path / "model", template, **config)


@pytest.fixture(scope="session")
def codec(model_folder: Path) -> Codec:
    return load_codec(model_folder, "tiny", 1)


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture(scope="session", params=["v4", "v41"])
def deepseek_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of V4, and of the test stand-in for V4.1; named after them."""
    write = write_v4 if request.param == "v4" else write_v41_stand_in
    return write(tmp_path_factory.mktemp("deepseek") / request.param)


@pytest.fixture(scope="session")
def deepseek(deepseek_folder: Path) -> Codec:
    return load_codec(deepseek_folder, deepseek_folder.name, 1)


@pytest.fixture(scope="session")
def a_shape() -> Callable[..., AnswerShape]:
    def build(**changes: object) -> AnswerShape:
        values: dict[str, object] = {
            "api": Api.CHAT_COMPLETIONS,
            "response_id": "chatcmpl-1",
            "created_s": 1700000000,
            "model": "tiny",
            "is_stream": True,
        }
        return AnswerShape(**(values | changes))  # type: ignore[arg-type]

    return build
