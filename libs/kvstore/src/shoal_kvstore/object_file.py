"""What the file of one stored object is: its name, its header, and how every way of being wrong is told.

A file is a header of 80 bytes and the object's bytes. The header names the format, the length, the key (its digest)
and the checksum of the bytes, keyed with that digest: bytes that belong to another key do not pass, whatever name
they were copied to. The checksum is blake3, which LMCache already brings; it is as fast as crc32 here (3.2 GB/s on
one core), keyed by construction, and it frees the interpreter while it works. xxh3 would be faster still, but
nothing that we install has it. Pure: no file is opened here. docs/decisions/0007-the-store-tells-the-truth.md
"""

import enum
import functools
import re
import struct
from urllib.parse import quote, unquote

from blake3 import blake3
from lmcache.v1.distributed.api import ObjectKey

MAGIC = b"SHOALKV1"
_HEADER = struct.Struct(">8sQ32s32s")  # magic with version, bytes of the object, digest of the key, checksum
HEADER_BYTES = _HEADER.size
SUFFIX = ".kv"
FOLDER = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(r"(?P<hash>[0-9a-f]{64})@(?P<rank>[0-9a-f]+)@(?P<group>[0-9a-f]+)@(?P<rest>[^/]+)\.kv")


class Damage(enum.Enum):
    """Why a file is not the object that its name says."""

    EMPTY = "empty"
    SHORT = "short"
    LONGER = "longer"
    FOREIGN = "foreign"  # no header of ours
    OTHER_KEY = "other_key"  # a whole object, of another key
    OTHER_LENGTH = "other_length"  # a whole object, but not of the length that the engine expects
    ALTERED = "altered"  # the bytes are not those that were stored


def file_name(key: ObjectKey) -> str:
    """The file of ``key``; no two keys share one. The block's hash comes first, so names sort by it."""
    salt = f"@{_coded(key.cache_salt)}" if key.cache_salt else ""
    return f"{key.chunk_hash.hex()}@{key.kv_rank:x}@{key.object_group_id:x}@{_coded(key.model_name)}{salt}{SUFFIX}"


def folder_name(key: ObjectKey) -> str:
    """The folder of ``key``'s file: the first byte of the block's hash."""
    return key.chunk_hash[:1].hex()


def key_of(name: str) -> ObjectKey | None:
    """The key of a file name; None when ``file_name`` did not make it."""
    parts = _NAME.fullmatch(name)
    if parts is None:
        return None
    model, _, salt = parts["rest"].partition("@")
    try:
        key = ObjectKey(
            chunk_hash=bytes.fromhex(parts["hash"]),
            model_name=_decoded(model),
            kv_rank=int(parts["rank"], 16),
            object_group_id=int(parts["group"], 16),
            cache_salt=_decoded(salt),
        )
    except ValueError:  # what LMCache forbids in a key
        return None
    return key if file_name(key) == name else None


@functools.lru_cache(maxsize=4096)  # a listing has few models and salts
def _coded(text: str) -> str:
    return quote(text, safe="")  # leaves no "@" and no "/"


@functools.lru_cache(maxsize=4096)
def _decoded(text: str) -> str:
    return unquote(text)


def key_digest(key: ObjectKey) -> bytes:
    """32 bytes that stand for every field of ``key``."""
    return blake3(file_name(key).encode()).digest()


def header_of(digest: bytes, payload: bytes | memoryview) -> bytes:
    """What is written before ``payload``, the object of the key with ``digest``."""
    return _HEADER.pack(MAGIC, len(payload), digest, _checksum(digest, payload))


def damage_of_header(header: bytes, digest: bytes, *, file_bytes: int, payload_bytes: int) -> Damage | None:
    """What is wrong with a file of ``file_bytes`` that should hold ``payload_bytes`` for the key with ``digest``."""
    if file_bytes == 0:
        return Damage.EMPTY
    if file_bytes < HEADER_BYTES or len(header) < HEADER_BYTES:
        return Damage.SHORT if MAGIC.startswith(header[: len(MAGIC)]) else Damage.FOREIGN
    magic, told_bytes, told_digest, _ = _HEADER.unpack(header)
    if magic != MAGIC:
        return Damage.FOREIGN
    if file_bytes != HEADER_BYTES + told_bytes:
        return Damage.SHORT if file_bytes < HEADER_BYTES + told_bytes else Damage.LONGER
    if told_digest != digest:
        return Damage.OTHER_KEY
    return None if told_bytes == payload_bytes else Damage.OTHER_LENGTH


def damage_of_payload(header: bytes, digest: bytes, payload: bytes | memoryview) -> Damage | None:
    """Whether ``payload``, read behind a header that is right, is what was stored."""
    checksum = _HEADER.unpack(header)[3]
    return None if _checksum(digest, payload) == checksum else Damage.ALTERED


def _checksum(digest: bytes, payload: bytes | memoryview) -> bytes:
    return blake3(payload, key=digest).digest()
