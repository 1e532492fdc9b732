"""The converter, on a Llama of two layers that is written here."""

import json

import gguf
import numpy as np
import pytest
import safetensors
from tokenizers import Tokenizer

from shoal_model.gguf_folder import folder_name, round_to_bfloat16, split_halves, write_folder

HEADS, KV_HEADS, HIDDEN, FFN = 4, 2, 32, 64
LETTERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789abcdefghijklmnopqrstuvwxyz", "Ġ", "12", "Ġa"]


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order that GGUF files have: first and second half of a head alternate."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, weights, *, architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(LETTERS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(LETTERS)
    writer.add_token_types([3, 3, 3] + [1] * (len(LETTERS) - 3))
    writer.add_token_merges(["1 2", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, values in weights.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def weights():
    random = np.random.default_rng(7)

    def matrix(rows, columns=HIDDEN):
        return random.standard_normal((rows, columns)).astype(np.float32)

    kv = HIDDEN // HEADS * KV_HEADS
    return {
        "token_embd.weight": matrix(len(LETTERS)),
        "output_norm.weight": matrix(1)[0],
        "blk.0.attn_norm.weight": matrix(1)[0],
        "blk.0.attn_q.weight": matrix(HIDDEN),
        "blk.0.attn_k.weight": matrix(kv),
        "blk.0.attn_v.weight": matrix(kv),
        "blk.0.attn_output.weight": matrix(HIDDEN),
        "blk.0.ffn_norm.weight": matrix(1)[0],
        "blk.0.ffn_gate.weight": matrix(FFN),
        "blk.0.ffn_up.weight": matrix(FFN),
        "blk.0.ffn_down.weight": matrix(HIDDEN, FFN),
    }


@pytest.fixture
def folder(tmp_path, weights):
    stored = {
        **weights,
        "blk.0.attn_q.weight": interleaved(weights["blk.0.attn_q.weight"], HEADS),
        "blk.0.attn_k.weight": interleaved(weights["blk.0.attn_k.weight"], KV_HEADS),
    }
    write_gguf(tmp_path / "tiny.gguf", stored)
    made = tmp_path / "made"
    made.mkdir()
    write_folder(tmp_path / "tiny.gguf", made, lambda _: None)
    return made


def test_every_weight_arrives_in_the_order_that_transformers_expects(folder, weights):
    made = dict(safetensors.deserialize((folder / "model.safetensors").read_bytes()))
    assert set(made) == {folder_name(name) for name in weights}
    for name, values in weights.items():
        tensor = made[folder_name(name)]
        assert (tensor["dtype"], tensor["shape"]) == ("BF16", list(values.shape))
        upper_halves = np.frombuffer(tensor["data"], dtype="<u2").astype(np.uint32)
        np.testing.assert_allclose((upper_halves << 16).view(np.float32), values.ravel(), rtol=2**-8)


def test_tokenizer_splits_digits_and_keeps_special_tokens(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("12").tokens == ["1", "2"], "a merge must not join digits"
    assert tokenizer.encode("b a<|im_end|>").tokens == ["b", "Ġa", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("b a12").ids) == "b a12"


def test_config_tells_shapes_and_special_ids(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["num_attention_heads"] == HEADS
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["head_dim"] == HIDDEN // HEADS
    assert config["eos_token_id"] == 2
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "{{ messages }}" in json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]


def test_another_architecture_is_refused_before_a_file_is_written(tmp_path, weights):
    write_gguf(tmp_path / "other.gguf", {}, architecture="qwen2")
    made = tmp_path / "made"
    made.mkdir()
    with pytest.raises(ValueError, match="not a Llama"):
        write_folder(tmp_path / "other.gguf", made, lambda _: None)
    assert list(made.iterdir()) == []


def test_unknown_tensor_is_refused():
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        folder_name("rope_freqs.weight")


def test_split_halves_undoes_the_interleaving():
    rows = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)
    np.testing.assert_array_equal(split_halves(interleaved(rows, 2), 2), rows)


@pytest.mark.parametrize(
    ("value", "upper_half"),
    [(1.0, 0x3F80), (1.0 + 2**-8, 0x3F80), (1.0 + 3 * 2**-8, 0x3F82), (1.0 + 2**-8 + 2**-20, 0x3F81), (-2.0, 0xC000)],
)
def test_rounding_takes_the_nearest_and_ties_to_even(value, upper_half):
    assert round_to_bfloat16(np.array([value], dtype=np.float32))[0] == upper_half
