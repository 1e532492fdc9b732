"""What takes part in a block's identity besides earlier blocks: its token ids, and the items among them.

All images of a prompt show the same placeholder token, so their placeholders are overwritten with values that
derive from the identifier of the item: two images never share a block. Pool and salt are not hashed; they
are fields beside the hash. The rules are LMCache's, because the store names its objects by them.
docs/decisions/0006-blocks.md
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

TOKEN_BYTES = 4
_VALUE_BITS = np.uint32(0x7FFF_FFFF)  # LMCache keeps token ids in signed 32 bits
_DIGEST_BYTES = 32
_COUNTER_BYTES = 8


class ItemSpan(Protocol):
    """Any description of a non-text part of a prompt: ours, the wire's and the engine's all fit."""

    @property
    def offset_tokens(self) -> int: ...

    @property
    def length_tokens(self) -> int: ...

    @property
    def identifier(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Item:
    """One non-text part of a prompt; its expanded placeholders start at ``offset_tokens`` of the whole prompt."""

    offset_tokens: int
    length_tokens: int
    identifier: str


def identity_words(token_ids: bytes, items: Iterable[ItemSpan]) -> npt.NDArray[np.uint32]:
    """The big-endian words that are hashed. ``token_ids`` is the whole prompt, packed little-endian uint32.

    A later item wins where items overlap; what stands past the end of the prompt is left out.
    """
    words = np.frombuffer(token_ids, dtype="<u4").astype(">u4")
    for item in items:
        start = item.offset_tokens
        length = min(item.length_tokens, len(words) - start)
        if length > 0:
            words[start : start + length] = _item_values(item.identifier, length)
    return words


def _item_values(identifier: str, length: int) -> npt.NDArray[np.uint32]:
    seed = hashlib.sha256(identifier.encode()).digest()
    digest_count = -(-length * TOKEN_BYTES // _DIGEST_BYTES)
    stream = b"".join(
        hashlib.sha256(seed + counter.to_bytes(_COUNTER_BYTES, "big")).digest() for counter in range(digest_count)
    )
    return np.frombuffer(stream, dtype=">u4")[:length].astype(np.uint32) & _VALUE_BITS
