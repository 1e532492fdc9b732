"""The names of blocks: a blake3 chain over whole blocks of a prompt, equal to LMCache's.

    ROOT = blake3(int64be 0 || uint32be 0)        h[i] = blake3(h[i-1] || uint32be tokens of block i)

A hash names a block together with everything before it. The last, partial block has no name. Pure functions;
77,000 tokens take about a millisecond. docs/decisions/0006-blocks.md
"""

from collections.abc import Sequence

from blake3 import blake3

from shoal_kvblocks.context import TOKEN_BYTES, ItemSpan, identity_words

HASH_BYTES = 32
ROOT_HASH = blake3(bytes(8) + bytes(4)).digest()


def block_hashes(token_ids: bytes, block_tokens: int, items: Sequence[ItemSpan] = ()) -> bytes:
    """Hashes of the whole blocks of a prompt, 32 bytes each, concatenated, first block first.

    ``token_ids`` is packed little-endian uint32. ValueError when its length is no multiple of four.
    """
    return extend_hashes(b"", token_ids, block_tokens, items)


def extend_hashes(hashes: bytes, token_ids: bytes, block_tokens: int, items: Sequence[ItemSpan] = ()) -> bytes:
    """Hashes of the whole blocks of ``token_ids``, of which ``hashes`` are already known to be the first ones.

    For a prompt that grew by its answer: ``token_ids`` is prompt and answer, ``hashes`` those of the prompt.
    ValueError when either length is impossible, or when ``hashes`` names more blocks than there are.
    """
    if block_tokens < 1:
        raise ValueError("block_tokens must be at least 1")
    if len(token_ids) % TOKEN_BYTES:
        raise ValueError("packed token ids must be a multiple of 4 bytes long")
    known_blocks = count_hashes(hashes)
    block_count = len(token_ids) // TOKEN_BYTES // block_tokens
    if known_blocks > block_count:
        raise ValueError("more hashes are given than there are whole blocks")
    words = identity_words(token_ids, items).tobytes()
    block_bytes = block_tokens * TOKEN_BYTES
    parent = hashes[-HASH_BYTES:] or ROOT_HASH
    chain = [hashes]
    for start in range(known_blocks * block_bytes, block_count * block_bytes, block_bytes):
        parent = blake3(parent + words[start : start + block_bytes]).digest()
        chain.append(parent)
    return b"".join(chain)


def count_hashes(hashes: bytes) -> int:
    """How many hashes are concatenated in ``hashes``; ValueError when that is no whole number."""
    if len(hashes) % HASH_BYTES:
        raise ValueError("block hashes must be a multiple of 32 bytes long")
    return len(hashes) // HASH_BYTES


def split_hashes(hashes: bytes) -> list[bytes]:
    """The single hashes of a concatenation, in order; ValueError as for ``count_hashes``."""
    return [hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in range(count_hashes(hashes))]
