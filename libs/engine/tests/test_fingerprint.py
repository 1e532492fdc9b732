"""Which engines share a pool: the ones whose stored KV means the same, and no others."""

from dataclasses import replace
from pathlib import Path

import pytest

from shoal_contracts import subjects
from shoal_engine.vllm.fingerprint import PoolFacts, digest_folder, digest_revision, pool_name
from shoal_testkit.models import write_tiny_model

FACTS = PoolFacts(
    model_digest="00",
    dtype="float32",
    kv_dtype="float32",
    device_kind="cpu-AVX2-amx0",
    block_tokens=128,
    parts="pp1-tp1-dcp1",
    traits="",
    vllm_version="0.32.0",
    lmcache_version="0.5.6",
)


@pytest.mark.parametrize("field", PoolFacts.__slots__)
def test_every_fact_makes_a_pool_of_its_own(field: str) -> None:
    other = replace(FACTS, **{field: 256 if field == "block_tokens" else "other"})
    assert pool_name("qwen3", other) != pool_name("qwen3", FACTS)
    assert pool_name("qwen3", replace(FACTS)) == pool_name("qwen3", FACTS)


def test_name_fits_into_subjects() -> None:
    name = pool_name("Qwen2_5.VL@x", FACTS)
    assert name.startswith("qwen2-5-vl-x-")
    assert subjects.prefill_job(name, "t0") == f"prefill.{name}.t0"


def test_copy_of_a_folder_has_the_same_digest(tmp_path: Path) -> None:
    one, two = (write_tiny_model(tmp_path / name, seed=1) for name in ("one", "two"))
    (two / "tokenizer.json").write_text("{}")  # token ids come in ready-made: it changes no KV
    assert digest_folder(one) == digest_folder(two)


def test_other_weights_or_another_configuration_have_another_digest(tmp_path: Path) -> None:
    digests = {
        digest_folder(write_tiny_model(tmp_path / "plain", seed=1)),
        digest_folder(write_tiny_model(tmp_path / "seed", seed=2)),
        digest_folder(write_tiny_model(tmp_path / "context", seed=1, context_tokens=64)),
    }
    weights = write_tiny_model(tmp_path / "bit", seed=1) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert len(digests | {digest_folder(weights.parent)}) == 4


def test_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError):
        digest_folder(tmp_path)


def test_revisions_of_a_hub_model_differ() -> None:
    assert digest_revision("org/model", "a") != digest_revision("org/model", "b")
