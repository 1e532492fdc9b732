"""Write a Llama model that comes as one GGUF file as the folder that vLLM and transformers read.

Weights are dequantised and rounded once to bfloat16; the rows of the query and key projections go back from
GGUF's interleaved order to the split halves that transformers rotates. The tokenizer keeps the digit-splitting
step that the ``smollm`` pre-tokenizer has: without it digits after white space get other ids than the model
was trained on. The chat template gets tools. Only the Llama architecture with a byte-level BPE is understood;
anything else raises ValueError before a file is written. The caller gives an empty folder and owns it, also after a
failure.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import safetensors

from shoal_model.tool_template import with_tools

CONTROL_TOKEN = 3  # GGUF token type of special tokens

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def write_folder(source: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Write config, generation config, tokenizer and weights of ``source`` into ``folder``."""
    reader = gguf.GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if facts["general.architecture"] != "llama" or facts["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"{source.name} is not a Llama model with SmolLM's tokenizer")
    say("writing the tokenizer")
    _write_json(folder / "config.json", _config(facts))
    _write_json(folder / "generation_config.json", _special_ids(facts))
    _write_json(folder / "tokenizer.json", _tokenizer(facts))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(facts))
    say(f"converting {len(reader.tensors)} tensors to bfloat16")
    _write_weights(reader, facts, folder / "model.safetensors")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def _special_ids(facts: Mapping[str, Any]) -> dict[str, int]:
    return {f"{name}_token_id": facts[f"tokenizer.ggml.{key}_token_id"] for name, key in _SPECIAL_KEYS.items()}


_SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "pad": "padding"}


def _config(facts: Mapping[str, Any]) -> dict[str, Any]:
    heads = facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.embedding_length"] // heads,
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": 1e-5,  # the file holds the nearest float32
        "rope_theta": facts["llama.rope.freq_base"],
        "vocab_size": facts["llama.vocab_size"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        **_special_ids(facts),
    }


def _tokenizer(facts: Mapping[str, Any]) -> dict[str, Any]:
    tokens, types = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **plain}
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in facts["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(facts: Mapping[str, Any]) -> dict[str, Any]:
    tokens, types = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts["llama.context_length"],
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "additional_special_tokens": [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN],
        "chat_template": with_tools(facts["tokenizer.chat_template"]),
    }


def _write_weights(reader: gguf.GGUFReader, facts: Mapping[str, Any], path: Path) -> None:
    heads = {
        "attn_q": facts["llama.attention.head_count"],
        "attn_k": facts["llama.attention.head_count_kv"],
    }
    rounded: dict[str, npt.NDArray[np.uint16]] = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in heads:
            values = split_halves(values, heads[part])
        rounded[folder_name(tensor.name)] = round_to_bfloat16(values)
    specs = {
        name: safetensors.TensorSpec(
            dtype="bfloat16", shape=list(bits.shape), data_ptr=bits.ctypes.data, data_len=bits.nbytes
        )
        for name, bits in rounded.items()
    }
    safetensors.serialize_file(specs, path, {"format": "pt"})


def folder_name(gguf_name: str) -> str:
    """The name that transformers gives to a tensor of a GGUF file."""
    if gguf_name in TOP_NAMES:
        return TOP_NAMES[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    raise ValueError(f"tensor {gguf_name} has no place in a Llama model")


def split_halves(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from interleaved pairs (GGUF) to first halves, then second halves (transformers)."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of the nearest bfloat16 numbers, ties to even; all values must be finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
