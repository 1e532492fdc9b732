"""An edge: what every family needs of a model's folder, read once at start."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastokens

from shoal_tokenizer.codec.encoder import FastEncoder, PromptBound
from shoal_tokenizer.codec.vocabulary import Vocabulary, read_vocabulary

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MIB = 1024 * 1024


class ModelFilesInvalid(Exception):
    """The model cannot be served from these files; the message says which one and why."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """``tokenizer`` is tokenizer.json parsed, ``source`` its text; ``config`` is tokenizer_config.json."""

    path: Path
    source: str
    tokenizer: dict[str, Any]
    config: dict[str, Any]
    vocabulary: Vocabulary
    encoder: FastEncoder

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder; empty where there is none."""
        return read_object(self.path / name)

    def special_tokens(self) -> dict[str, str]:
        """Names of tokenizer_config.json, as templates know them -> spelling."""
        found: dict[str, str] = {}
        for name in _SPECIAL_TOKENS:
            token = self.config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[name] = token
        return found

    def stop_token_ids(self) -> set[int]:
        """Those that end a turn; generation_config.json wins over config.json, as in transformers."""
        eos = self.read("generation_config.json").get("eos_token_id", self.read("config.json").get("eos_token_id"))
        return set(eos if isinstance(eos, list) else [] if eos is None else [eos])


def read_folder(path: Path, segment_cache_mib: int) -> ModelFolder:
    """Takes seconds for large vocabularies."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelFilesInvalid(f"{file} is missing; models without it are not supported")
    source = file.read_text()
    tokenizer: dict[str, Any] = json.loads(source)
    vocabulary = read_vocabulary(tokenizer)
    fast = fastokens.Tokenizer.from_file(str(file))
    fast.enable_segment_cache(segment_cache_mib * _MIB)
    encoder = FastEncoder(fast, _prompt_bound(path, vocabulary))
    return ModelFolder(path, source, tokenizer, read_object(path / "tokenizer_config.json"), vocabulary, encoder)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file; empty where there is none."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ModelFilesInvalid(f"{path} is not a JSON object")
    return content


def _prompt_bound(path: Path, vocabulary: Vocabulary) -> PromptBound | None:
    """None for a model that does not say how long its context is."""
    config = read_object(path / "config.json")
    context_tokens = (config.get("text_config") or config).get("max_position_embeddings")
    longest_bytes = max(map(len, vocabulary.spelled))
    return PromptBound(context_tokens, longest_bytes) if isinstance(context_tokens, int) else None
