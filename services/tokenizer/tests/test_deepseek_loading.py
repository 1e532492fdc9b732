"""Which family a folder belongs to, and which files are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal_testkit.deepseek_tokenizer import CONTEXT_TOKENS, write_v4, write_v41_stand_in
from shoal_tokenizer.codec.api import Codec
from shoal_tokenizer.codec.chat_template.renderer import ChatTemplate
from shoal_tokenizer.codec.conversation import Conversation
from shoal_tokenizer.codec.deepseek.renderer import DeepseekRenderer
from shoal_tokenizer.families import CodecName, load_family
from shoal_tokenizer.model_files import load_codec
from shoal_tokenizer.model_folder import ModelFilesInvalid, read_folder

USER = {"role": "user", "content": "Hi"}


def prompt(codec: Codec) -> str:
    return "".join(text for text, _is_control in codec.renderer.render(Conversation([USER]), 0).segments)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, ensure_ascii=False))


def test_the_family_is_what_config_json_says(deepseek: Codec, codec: Codec) -> None:
    assert isinstance(codec.renderer, ChatTemplate) and isinstance(deepseek.renderer, DeepseekRenderer)
    assert ("<｜System｜>" in prompt(deepseek)) == (deepseek.model == "v41")


def test_an_architecture_is_enough(tmp_path: Path) -> None:
    folder = write_v41_stand_in(tmp_path)
    rewrite(folder / "config.json", lambda config: config.update(model_type="multimodal"))
    assert "<｜System｜>" in prompt(load_codec(folder, "m", 0))


def test_the_setting_wins_over_the_files(tmp_path: Path, model_folder: Path) -> None:
    folder = write_v4(tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(ModelFilesInvalid, match="no chat template"):
        load_codec(folder, "m", 0)
    assert prompt(load_codec(folder, "m", 0, CodecName.DEEPSEEK_V4)).startswith("<｜begin▁of▁sentence｜>")
    assert isinstance(load_codec(model_folder, "m", 0, CodecName.CHAT_TEMPLATE).renderer, ChatTemplate)


def test_the_tokenizer_of_another_model_is_refused(tmp_path: Path, model_folder: Path) -> None:
    v4 = write_v4(tmp_path)
    with pytest.raises(ModelFilesInvalid, match=r"does not fit DeepSeek V4\.1: .*<｜System｜>.*another model"):
        load_codec(v4, "m", 0, CodecName.DEEPSEEK_V41)
    with pytest.raises(ModelFilesInvalid, match="does not fit DeepSeek V4: it has no token <｜end▁of▁sentence｜>"):
        load_codec(model_folder, "m", 0, CodecName.DEEPSEEK_V4)


def test_a_prompt_that_would_be_encoded_otherwise_than_by_recipe_is_refused(tmp_path: Path) -> None:
    files = read_folder(write_v4(tmp_path / "a"), 0)

    class Shifted:
        def encode(self, segments: Any) -> list[int]:
            return [*files.encoder.encode(segments), 0]

    broken = type(files)(files.path, files.source, files.tokenizer, files.config, files.vocabulary, Shifted())  # type: ignore[arg-type]
    with pytest.raises(ModelFilesInvalid, match="encoded differently"):
        load_family(broken, CodecName.AUTO)


def test_defaults_are_the_turns_end_and_what_recipe_says(deepseek_folder: Path, tmp_path: Path) -> None:
    folder = write_v4(tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 1}')
    defaults = load_family(read_folder(folder, 0), CodecName.AUTO).defaults
    assert (defaults.temperature, defaults.stop_token_ids) == (None, [1])
    bound = read_folder(deepseek_folder, 0).encoder._bound
    assert bound is not None and bound.context_tokens == CONTEXT_TOKENS
