"""Which family a folder belongs to, and which files are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal_testkit.deepseek_tokenizer import write_v4
from shoal_tokenizer.codec.api import Codec
from shoal_tokenizer.codec.chat_template.renderer import ChatTemplate
from shoal_tokenizer.codec.deepseek.renderer import DeepseekRenderer
from shoal_tokenizer.families import CodecName, load_family
from shoal_tokenizer.model_files import load_codec
from shoal_tokenizer.model_folder import ModelFilesInvalid, ModelFolder, read_folder

Folders = Callable[..., ModelFolder]


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return read_folder(write_v4(tmp_path_factory.mktemp("v4")), 0)


@pytest.fixture
def a_folder(v4: ModelFolder, tmp_path: Path) -> Folders:
    """V4's tokenizer with a config.json of these fields; None: without that file."""

    def build(config: dict[str, Any] | None) -> ModelFolder:
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        return replace(v4, path=tmp_path)

    return build


def test_the_family_is_what_config_json_says(deepseek: Codec, codec: Codec) -> None:
    assert isinstance(codec.renderer, ChatTemplate)
    assert isinstance(deepseek.renderer, DeepseekRenderer)
    assert deepseek.renderer.dialect.name == {"v4": "DeepSeek V4", "v41": "DeepSeek V4.1"}[deepseek.model]


@pytest.mark.parametrize(
    "config", [{"model_type": "deepseek_v4"}, {"model_type": "x", "architectures": ["DeepseekV4ForCausalLM"]}]
)
def test_a_type_or_an_architecture_is_enough(a_folder: Folders, config: dict[str, Any]) -> None:
    assert isinstance(load_family(a_folder(config), CodecName.AUTO).renderer, DeepseekRenderer)


def test_the_setting_wins_over_the_files(a_folder: Folders, model_folder: Path) -> None:
    folder = a_folder(None)
    with pytest.raises(ModelFilesInvalid, match="no chat template"):
        load_family(folder, CodecName.AUTO)
    assert isinstance(load_family(folder, CodecName.DEEPSEEK_V4).renderer, DeepseekRenderer)
    assert isinstance(load_codec(model_folder, "m", 0, CodecName.CHAT_TEMPLATE).renderer, ChatTemplate)


def test_the_tokenizer_of_another_model_is_refused(v4: ModelFolder, model_folder: Path) -> None:
    with pytest.raises(ModelFilesInvalid, match=r"does not fit DeepSeek V4\.1: .*<｜System｜>.*another model"):
        load_family(v4, CodecName.DEEPSEEK_V41)
    with pytest.raises(ModelFilesInvalid, match="does not fit DeepSeek V4: it has no token <｜end▁of▁sentence｜>"):
        load_family(read_folder(model_folder, 0), CodecName.DEEPSEEK_V4)


def test_a_prompt_that_would_be_encoded_otherwise_than_by_recipe_is_refused(v4: ModelFolder) -> None:
    class Shifted:
        def encode(self, segments: Any) -> list[int]:
            return [*v4.encoder.encode(segments), 0]

    with pytest.raises(ModelFilesInvalid, match="encoded differently"):
        load_family(replace(v4, encoder=Shifted()), CodecName.AUTO)  # type: ignore[arg-type]


def test_defaults_are_the_turns_end_and_what_recipe_says(a_folder: Folders) -> None:
    folder = a_folder(None)
    assert load_family(folder, CodecName.DEEPSEEK_V4).defaults.stop_token_ids == [1]
    (folder.path / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 7]}')
    defaults = load_family(folder, CodecName.DEEPSEEK_V4).defaults
    assert (defaults.temperature, defaults.stop_token_ids) == (None, [1, 7])
