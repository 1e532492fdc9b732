"""Block identity: token ids, and the items among them, to chained block hashes."""

from shoal_kvblocks.context import Item, ItemSpan, identity_words
from shoal_kvblocks.hashing import HASH_BYTES, ROOT_HASH, block_hashes, count_hashes, extend_hashes, split_hashes

__all__ = [
    "HASH_BYTES",
    "ROOT_HASH",
    "Item",
    "ItemSpan",
    "block_hashes",
    "count_hashes",
    "extend_hashes",
    "identity_words",
    "split_hashes",
]
