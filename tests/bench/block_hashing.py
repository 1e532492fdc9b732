"""Naming the blocks of a prompt of 77,000 tokens, against blake3 of each block by itself."""

import random
import time
from array import array

from blake3 import blake3
from rows import Row

from shoal_kvblocks import block_hashes

TOKENS = 77_000
BLOCK_TOKENS = 128
BLOCK_BYTES = 4 * BLOCK_TOKENS
ROUNDS = 50


def measure() -> list[Row]:
    """A B A B in this process."""
    token_ids = array("I", (random.randrange(150_000) for _ in range(TOKENS))).tobytes()
    names: list[float] = []
    plain: list[float] = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        for start in range(0, len(token_ids) - BLOCK_BYTES + 1, BLOCK_BYTES):
            blake3(token_ids[start : start + BLOCK_BYTES]).digest()
        plain.append(1e3 * (time.perf_counter() - began_s))
        began_s = time.perf_counter()
        block_hashes(token_ids, BLOCK_TOKENS)
        names.append(1e3 * (time.perf_counter() - began_s))
    case = f"{TOKENS} tokens"
    return [
        Row("block_hashing", case, "blake3 of each block", "ms", tuple(plain), is_baseline=True),
        Row("block_hashing", case, "block_hashes", "ms", tuple(names)),
    ]
