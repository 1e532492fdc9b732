"""Tiny random models for tests: a real architecture, real KV, a few megabytes, no download and no torch.

The weights derive from the seed alone, so two calls write equal bytes: two engines on two copies form one pool.
Outputs look random and depend on every token that the architecture lets them see, which an exactness test needs.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

_LAYERS = 4
_WINDOW_LAYERS = ("sliding_attention", "sliding_attention", "full_attention") * 2
_HIDDEN = 128
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 32
_FEED_FORWARD = 256

TINY_VOCAB_TOKENS = 1024
TINY_WINDOW_TOKENS = 256

_SHAPE = {
    "hidden_size": _HIDDEN,
    "intermediate_size": _FEED_FORWARD,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "vocab_size": TINY_VOCAB_TOKENS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": None,
    "torch_dtype": "float32",
}

_Weights = dict[str, npt.NDArray[np.float32]]


def write_tiny_model(
    folder: Path, *, seed: int = 0, context_tokens: int = 8192, eos_token_id: int | None = None
) -> Path:
    """Write a float32 Qwen3 of 1 million parameters that vLLM and transformers load; returns ``folder``."""
    config = _SHAPE | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": _LAYERS,
        "hidden_act": "silu",
        "max_position_embeddings": context_tokens,
        "rope_theta": 10000.0,
        "eos_token_id": eos_token_id,
    }
    random = np.random.default_rng(seed)
    weights = _ends(random)
    for layer in range(_LAYERS):
        weights |= _layer(random, f"model.layers.{layer}")
    return _write(folder, config, weights)


def write_tiny_window_model(folder: Path, *, seed: int = 0, context_tokens: int = 8192) -> Path:
    """Write a float32 Gemma 3: two layers of three see the last ``TINY_WINDOW_TOKENS`` only; returns ``folder``."""
    config = _SHAPE | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": len(_WINDOW_LAYERS),
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": list(_WINDOW_LAYERS),
        "sliding_window": TINY_WINDOW_TOKENS,
        "query_pre_attn_scalar": _HEAD_DIM,
        "max_position_embeddings": context_tokens,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "eos_token_id": None,
        "pad_token_id": None,
    }
    random = np.random.default_rng(seed)
    weights = _ends(random)
    for layer in range(len(_WINDOW_LAYERS)):
        name = f"model.layers.{layer}"
        weights |= _layer(random, name)
        weights[f"{name}.pre_feedforward_layernorm.weight"] = _norm(_HIDDEN)
        weights[f"{name}.post_feedforward_layernorm.weight"] = _norm(_HIDDEN)
    # Gemma adds 1 to the weight of every norm and multiplies what it reads of the vocabulary by this root.
    weights = {name: weight - 1 if "norm" in name else weight for name, weight in weights.items()}
    weights["model.embed_tokens.weight"] /= np.float32(_HIDDEN**0.5)
    return _write(folder, config, weights)


def _write(folder: Path, config: Mapping[str, object], weights: _Weights) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _ends(random: np.random.Generator) -> _Weights:
    """What stands before the first layer and after the last."""
    return {
        "model.embed_tokens.weight": random.standard_normal((TINY_VOCAB_TOKENS, _HIDDEN), dtype=np.float32),
        "model.norm.weight": _norm(_HIDDEN),
        "lm_head.weight": _matrix(random, TINY_VOCAB_TOKENS, _HIDDEN),
    }


def _layer(random: np.random.Generator, name: str) -> _Weights:
    return {
        f"{name}.input_layernorm.weight": _norm(_HIDDEN),
        f"{name}.post_attention_layernorm.weight": _norm(_HIDDEN),
        f"{name}.self_attn.q_proj.weight": _matrix(random, _HEADS * _HEAD_DIM, _HIDDEN),
        f"{name}.self_attn.k_proj.weight": _matrix(random, _KV_HEADS * _HEAD_DIM, _HIDDEN),
        f"{name}.self_attn.v_proj.weight": _matrix(random, _KV_HEADS * _HEAD_DIM, _HIDDEN),
        f"{name}.self_attn.o_proj.weight": _matrix(random, _HIDDEN, _HEADS * _HEAD_DIM),
        # Sharp attention: a random average over a long prompt would be the same for every prompt.
        f"{name}.self_attn.q_norm.weight": _norm(_HEAD_DIM, 5),
        f"{name}.self_attn.k_norm.weight": _norm(_HEAD_DIM),
        f"{name}.mlp.gate_proj.weight": _matrix(random, _FEED_FORWARD, _HIDDEN),
        f"{name}.mlp.up_proj.weight": _matrix(random, _FEED_FORWARD, _HIDDEN),
        f"{name}.mlp.down_proj.weight": _matrix(random, _HIDDEN, _FEED_FORWARD),
    }


def _matrix(random: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.float32]:
    return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(2 / columns**0.5)


def _norm(size: int, scale: float = 1) -> npt.NDArray[np.float32]:
    return np.full(size, scale, dtype=np.float32)
