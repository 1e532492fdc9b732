"""Block hashes against a direct reading of the formula, and their algebra."""

import hashlib
import struct

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_kvblocks import HASH_BYTES, ROOT_HASH, Item, block_hashes, count_hashes, extend_hashes, split_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=120)
BLOCK_TOKENS = st.integers(1, 40)
ITEMS = st.lists(st.builds(Item, st.integers(0, 140), st.integers(0, 60), st.text(max_size=8)), max_size=3)


def pack(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def formula(tokens: list[int], block_tokens: int) -> list[bytes]:
    parent, hashes = ROOT_HASH, []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = blake3(parent + struct.pack(f">{block_tokens}I", *tokens[start : start + block_tokens])).digest()
        hashes.append(parent)
    return hashes


def overwritten(tokens: list[int], items: list[Item]) -> list[int]:
    result = list(tokens)
    for item in items:
        seed = hashlib.sha256(item.identifier.encode()).digest()
        for i in range(item.length_tokens):
            block = hashlib.sha256(seed + struct.pack(">Q", i // 8)).digest()
            if item.offset_tokens + i < len(result):
                result[item.offset_tokens + i] = struct.unpack_from(">I", block, 4 * (i % 8))[0] & 0x7FFFFFFF
    return result


@settings(deadline=None, max_examples=50)
@given(TOKENS, BLOCK_TOKENS, ITEMS)
def test_hashes_follow_the_formula_with_items_overwritten(
    tokens: list[int], block_tokens: int, items: list[Item]
) -> None:
    expected = formula(overwritten(tokens, items), block_tokens)
    assert split_hashes(block_hashes(pack(tokens), block_tokens, items)) == expected


@settings(deadline=None, max_examples=50)
@given(TOKENS, TOKENS, BLOCK_TOKENS, ITEMS)
def test_extending_a_prompt_equals_hashing_the_whole(
    prompt: list[int], answer: list[int], block_tokens: int, items: list[Item]
) -> None:
    # Items belong to the prompt: one that reaches past its end would change what the prompt's hashes cover.
    inside = [item for item in items if item.offset_tokens + item.length_tokens <= len(prompt)]
    known = block_hashes(pack(prompt), block_tokens, inside)
    whole = pack(prompt + answer)
    assert extend_hashes(known, whole, block_tokens, inside) == block_hashes(whole, block_tokens, inside)


@settings(deadline=None, max_examples=50)
@given(TOKENS, st.integers(0, 2**32 - 1), BLOCK_TOKENS, st.data())
def test_a_changed_token_renames_its_block_and_all_later_ones_only(
    tokens: list[int], other: int, block_tokens: int, data: st.DataObject
) -> None:
    if not tokens:
        return
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[position] = other if other != tokens[position] else (other + 1) % 2**32
    before = split_hashes(block_hashes(pack(tokens), block_tokens))
    after = split_hashes(block_hashes(pack(changed), block_tokens))
    border = position // block_tokens
    assert before[:border] == after[:border]
    assert all(a != b for a, b in zip(before[border:], after[border:], strict=True))


def test_equal_images_share_blocks_and_different_ones_do_not() -> None:
    prompt = pack([7] * 256)
    cat, dog = Item(10, 100, "cat"), Item(10, 100, "dog")
    assert block_hashes(prompt, 128, [cat]) == block_hashes(prompt, 128, [cat])
    assert not set(split_hashes(block_hashes(prompt, 128, [cat]))) & set(split_hashes(block_hashes(prompt, 128, [dog])))


def test_partial_blocks_have_no_name() -> None:
    assert [count_hashes(block_hashes(pack([1] * n), 128)) for n in (0, 127, 128, 255, 256)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("hashes", "token_ids", "block_tokens"),
    [(b"", b"123", 1), (b"", b"", 0), (b"x" * 31, bytes(400), 1), (bytes(HASH_BYTES * 2), bytes(4), 1)],
)
def test_impossible_lengths_are_refused(hashes: bytes, token_ids: bytes, block_tokens: int) -> None:
    with pytest.raises(ValueError):
        extend_hashes(hashes, token_ids, block_tokens)
