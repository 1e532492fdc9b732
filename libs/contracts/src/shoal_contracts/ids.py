"""Identifiers that several services make or read, and the packed forms of tokens, hashes and columns.

Token ids and column numbers are little-endian uint32 (four bytes each) on every machine.
"""

import secrets
import sys
from array import array
from collections.abc import Iterable, Sequence

BLOCK_HASH_BYTES = 32


def new_request_id() -> str:
    """A request's name: 24 hex digits; the ids that each API shows derive from it."""
    return secrets.token_hex(12)


def new_instance_id(role: str) -> str:
    """A process's name when its settings give none: the role and 8 hex digits; safe inside a NATS subject."""
    return f"{role}-{secrets.token_hex(4)}"


def pack_u32(values: Iterable[int]) -> bytes:
    """Pack integers of 0 .. 2**32-1; OverflowError outside."""
    packed = array("I", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_u32(packed: bytes) -> Sequence[int]:
    """The integers in ``packed`` as an ``array``; ValueError when its length is no multiple of four."""
    if len(packed) % 4:
        raise ValueError("packed integers must be a multiple of 4 bytes long")
    values = array("I")
    values.frombytes(packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def count_u32(packed: bytes) -> int:
    """How many integers ``packed`` holds."""
    return len(packed) // 4
