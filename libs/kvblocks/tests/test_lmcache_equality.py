"""Our hashes against LMCache's own hasher and its own overwriting of placeholders."""

import random
import struct
from types import SimpleNamespace

import pytest

from shoal_kvblocks import Item, block_hashes, split_hashes

pytestmark = pytest.mark.engine


def a_prompt(tokens: int) -> list[int]:
    return random.Random(tokens).choices(range(151_936), k=tokens)


@pytest.mark.parametrize("block_tokens", [16, 128, 256])
@pytest.mark.parametrize("prompt_tokens", [0, 1, 127, 128, 129, 2000])
def test_text_prompts(prompt_tokens: int, block_tokens: int) -> None:
    from lmcache.v1.multiprocess.token_hasher import TokenHasher

    prompt = a_prompt(prompt_tokens)
    ours = split_hashes(block_hashes(struct.pack(f"<{len(prompt)}I", *prompt), block_tokens))
    assert ours == TokenHasher(block_tokens, "blake3").compute_chunk_hashes(prompt)


def test_prompts_with_images() -> None:
    import torch
    from lmcache.integration.vllm.utils import apply_mm_hashes_to_token_ids
    from lmcache.v1.multiprocess.token_hasher import TokenHasher

    prompt = a_prompt(1000)
    items = [Item(5, 300, "first"), Item(400, 7, "second"), Item(900, 200, "reaches past the end")]
    theirs = apply_mm_hashes_to_token_ids(
        torch.tensor(prompt),
        [item.identifier for item in items],
        [SimpleNamespace(offset=item.offset_tokens, length=item.length_tokens) for item in items],
    )
    expected = TokenHasher(128, "blake3").compute_chunk_hashes(theirs.tolist())
    assert split_hashes(block_hashes(struct.pack("<1000I", *prompt), 128, items)) == expected
