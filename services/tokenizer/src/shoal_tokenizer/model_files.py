"""An edge: the files of a model, read once at start, and the codec that they make.

``chat_template.jinja`` wins over ``chat_template`` in tokenizer_config.json, generation_config.json over
config.json, as in transformers. A name that is no folder is fetched from the hub, tokenizer files only.
"""

import json
from pathlib import Path
from typing import Any

import fastokens
import tokenizers

from shoal_tokenizer.codec.api import AnswerShape, Api, Codec, Sampling
from shoal_tokenizer.codec.chat_completion_events import write_chat_completion
from shoal_tokenizer.codec.chat_completions import ChatCompletionsConverter
from shoal_tokenizer.codec.chat_template import ChatTemplate, verify
from shoal_tokenizer.codec.encoder import FastEncoder, Markers, PromptBound
from shoal_tokenizer.codec.text_parser import TextParser
from shoal_tokenizer.codec.vocabulary import Vocabulary, read_vocabulary

_HUB_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json"]
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MIB = 1024 * 1024


class ModelFilesInvalid(Exception):
    """The model cannot be served from these files; the message says which one and why."""


def locate(model: str) -> Path:
    """The folder of ``model``; fetches from the hub when there is none of that name."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.startswith((".", "/", "~")):
        raise ModelFilesInvalid(f"{model} is not a folder")
    from huggingface_hub import snapshot_download  # heavy, and not needed for a folder

    return Path(snapshot_download(model, allow_patterns=_HUB_FILES))


def load_codec(folder: Path, served_name: str, segment_cache_mib: int) -> Codec:
    """Read, build and verify; takes seconds for large vocabularies."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFilesInvalid(f"{path} is missing; models without it are not supported")
    source = path.read_text()
    spec: dict[str, Any] = json.loads(source)
    config = _read(folder / "tokenizer_config.json")
    vocabulary = read_vocabulary(spec)
    markers = Markers(spec.get("added_tokens") or [])
    template = ChatTemplate(_template_source(folder, config), _special_tokens(config), markers)
    fast = fastokens.Tokenizer.from_file(str(path))
    fast.enable_segment_cache(segment_cache_mib * _MIB)
    encoder = FastEncoder(fast, _prompt_bound(folder, vocabulary))
    reference = tokenizers.Tokenizer.from_str(source)
    verify(template, encoder, lambda text: reference.encode(text, add_special_tokens=False).ids)

    def new_parser(shape: AnswerShape) -> TextParser:
        return TextParser(vocabulary, shape.stop_strings, shape.has_logprobs)

    return Codec(
        model=served_name,
        converters={
            Api.CHAT_COMPLETIONS: ChatCompletionsConverter(
                served_name, _default_sampling(folder, config, reference), len(vocabulary)
            )
        },
        renderer=template,
        encoder=encoder,
        new_parser=new_parser,
        writers={Api.CHAT_COMPLETIONS: write_chat_completion},
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ModelFilesInvalid(f"{path} is not a JSON object")
    return content


def _prompt_bound(folder: Path, vocabulary: Vocabulary) -> PromptBound | None:
    """None for a model that does not say how long its context is."""
    config = _read(folder / "config.json")
    context_tokens = (config.get("text_config") or config).get("max_position_embeddings")
    longest_bytes = max(map(len, vocabulary.spelled))
    return PromptBound(context_tokens, longest_bytes) if isinstance(context_tokens, int) else None


def _template_source(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    if not isinstance(template, str):
        raise ModelFilesInvalid(f"{folder} has no chat template (chat_template.jinja or tokenizer_config.json)")
    return template


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _default_sampling(folder: Path, config: dict[str, Any], reference: tokenizers.Tokenizer) -> Sampling:
    """The model's own defaults and the tokens that end its turn."""
    generation = _read(folder / "generation_config.json")
    eos = generation.get("eos_token_id", _read(folder / "config.json").get("eos_token_id"))
    stop_ids = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if eos_token := _special_tokens(config).get("eos_token"):
        stop_ids |= {reference.token_to_id(eos_token)} - {None}
    return Sampling(
        temperature=generation.get("temperature"),
        top_p=generation.get("top_p"),
        top_k=generation.get("top_k") or None,
        min_p=generation.get("min_p"),
        repetition_penalty=generation.get("repetition_penalty"),
        stop_token_ids=sorted(stop_ids),
    )
