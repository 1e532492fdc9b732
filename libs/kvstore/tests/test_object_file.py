"""Names lead back to their key, and no damaged file passes for its object."""

from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache.v1.distributed.api import ObjectKey

from shoal_kvstore.object_file import (
    HEADER_BYTES,
    Damage,
    damage_of_header,
    damage_of_payload,
    file_name,
    folder_name,
    header_of,
    key_digest,
    key_of,
)

names = st.text(st.characters(exclude_characters="@", exclude_categories=["Cs"]), min_size=1, max_size=40)
salts = st.text(st.characters(exclude_characters="@/\\\x00", exclude_categories=["Cs"]), max_size=20)
keys = st.builds(
    ObjectKey,
    chunk_hash=st.binary(min_size=32, max_size=32),
    model_name=names,
    kv_rank=st.integers(0, 2**32 - 1),
    object_group_id=st.integers(0, 1000),
    cache_salt=salts,
)
payloads = st.binary(min_size=1, max_size=300)


def damage_of(content: bytes, key: ObjectKey, payload_bytes: int) -> Damage | None:
    """What a reader says of a file with this content."""
    digest = key_digest(key)
    header = content[:HEADER_BYTES]
    damage = damage_of_header(header, digest, file_bytes=len(content), payload_bytes=payload_bytes)
    return damage or damage_of_payload(header, digest, content[HEADER_BYTES:])


def content_of(key: ObjectKey, payload: bytes) -> bytes:
    return header_of(key_digest(key), payload) + payload


@settings(deadline=None, max_examples=50)
@given(keys)
def test_a_name_leads_back_to_its_key(key):
    name = file_name(key)
    assert key_of(name) == key
    assert name.startswith(folder_name(key))
    assert "/" not in name


@settings(deadline=None, max_examples=50)
@given(keys, keys)
def test_two_keys_have_two_names_that_sort_by_the_blocks_hash(one, other):
    assert (file_name(one) == file_name(other)) == (one == other)
    if one.chunk_hash != other.chunk_hash:
        assert (file_name(one) < file_name(other)) == (one.chunk_hash < other.chunk_hash)


def test_names_that_are_not_ours_have_no_key():
    ours = file_name(ObjectKey(b"\x01" * 32, "org/model", 16777472))
    assert key_of(ours) is not None
    for name in ("", "x", ours.upper(), ours + "~", ours.replace(".kv", ".data"), ours.replace("%2F", "/"), "0" + ours):
        assert key_of(name) is None
    assert key_of(f"{'01' * 32}@01@0@model.kv") is None, "a rank that we would write in another way"
    assert key_of(f"{'01' * 32}@1@0@model@a%2Fb.kv") is None, "a salt that LMCache forbids"


@settings(deadline=None, max_examples=50)
@given(keys, payloads)
def test_what_was_written_passes(key, payload):
    assert damage_of(content_of(key, payload), key, len(payload)) is None


@settings(deadline=None, max_examples=50)
@given(keys, payloads, st.data())
def test_any_flipped_bit_is_seen(key, payload, data):
    content = bytearray(content_of(key, payload))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    damage = damage_of(bytes(content), key, len(payload))
    assert damage is not None
    if place >= HEADER_BYTES:
        assert damage is Damage.ALTERED


@settings(deadline=None, max_examples=50)
@given(keys, payloads, st.data())
def test_any_cut_and_any_extension_is_seen(key, payload, data):
    content = content_of(key, payload)
    assert damage_of(b"", key, len(payload)) is Damage.EMPTY
    cut = data.draw(st.integers(1, len(content) - 1))
    assert damage_of(content[:cut], key, len(payload)) is Damage.SHORT
    assert damage_of(content + data.draw(payloads), key, len(payload)) is Damage.LONGER


@settings(deadline=None, max_examples=50)
@given(keys, keys, payloads)
def test_a_whole_object_of_another_key_is_seen(key, other, payload):
    if key != other:
        assert damage_of(content_of(other, payload), key, len(payload)) is Damage.OTHER_KEY


@settings(deadline=None, max_examples=50)
@given(keys, keys, payloads)
def test_bytes_of_another_key_under_a_header_that_claims_ours_are_seen(key, other, payload):
    if key != other:
        forged = header_of(key_digest(other), payload)
        forged = forged[:16] + key_digest(key) + forged[48:] + payload
        assert damage_of(forged, key, len(payload)) is Damage.ALTERED


@settings(deadline=None, max_examples=50)
@given(keys, payloads)
def test_an_object_of_another_length_is_seen(key, payload):
    assert damage_of(content_of(key, payload), key, len(payload) + 1) is Damage.OTHER_LENGTH


def test_a_file_that_is_not_ours_is_foreign():
    key = ObjectKey(b"\x01" * 32, "model", 0)
    assert damage_of(b"something else" * 20, key, 200) is Damage.FOREIGN
    assert damage_of(b"tiny", key, 200) is Damage.FOREIGN
