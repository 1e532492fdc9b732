"""The pool of a vLLM engine: a name that two engines share exactly when each can read the other's stored KV.

LMCache names stored blocks by token ids and by the model's name alone. bfloat16 blocks read by a float32 engine
were seen to give garbage without an error, so everything that changes a byte of KV goes into the name: the weights
themselves for a local folder (a path says nothing about its content), dtype, layout, how workers divide a block, block
size, what a profile changes, and the versions of the two programs that decide layout. When in doubt two engines do
not share.
docs/decisions/0002-a-pool-is-what-can-share-kv.md
"""

import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from blake3 import blake3

POOL_KEY = "shoal.pool"  # under which the pool stands in the connector's configuration

_DIGEST_CHARACTERS = 20  # 80 bits: no two of a fleet's pools meet by chance
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")  # in the order of vLLM's own preference
_CONFIGS = ("config.json", "hf_quant_config.json")


@dataclass(frozen=True, slots=True)
class KvParts:
    """How the workers of one engine divide the KV of a block."""

    count: int = 1
    shape: str = ""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """Everything that changes what stored KV means."""

    model_digest: str
    dtype: str
    kv_dtype: str
    device_kind: str
    block_tokens: int
    parts: str
    traits: str
    vllm_version: str
    lmcache_version: str


def pool_name(model_type: str, facts: PoolFacts) -> str:
    """A name made of letters, digits and ``-``: it becomes part of NATS subjects and of file names."""
    digest = blake3("\0".join(map(str, astuple(facts))).encode()).hexdigest()
    return f"{re.sub(r'[^a-z0-9]+', '-', model_type.lower()).strip('-')}-{digest[:_DIGEST_CHARACTERS]}"


def digest_folder(folder: Path) -> str:
    """Digest of what a local model computes: its configuration and every byte of its weights.

    Sizes and times would be cheaper and would lie: a fine-tune has the same sizes, a copy has other times. Reading
    is not wasted, vLLM finds the files in the page cache afterwards. Raises FileNotFoundError when there are none.
    """
    files = [folder / name for name in _CONFIGS if (folder / name).is_file()] + _weights(folder)
    return _digest((path.name, _digest_file(path)) for path in files)


def digest_revision(model: str, revision: str) -> str:
    """Digest of a hub model: its commit names its content."""
    return _digest([(model, revision)])


def _weights(folder: Path) -> list[Path]:
    for suffix in _WEIGHT_SUFFIXES:
        if found := sorted(path for path in folder.iterdir() if path.suffix == suffix):
            return found
    raise FileNotFoundError(f"no weights in {folder}")


def _digest_file(path: Path) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    return hasher.hexdigest()


def _digest(parts: Iterable[tuple[str, str]]) -> str:
    return blake3("\0".join(text for part in parts for text in part).encode()).hexdigest()
