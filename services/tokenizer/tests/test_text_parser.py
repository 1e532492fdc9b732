from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shoal_tokenizer.codec.api import Codec, TokenLogprob
from shoal_tokenizer.codec.text_parser import StopStrings, TextParser
from shoal_tokenizer.codec.vocabulary import Vocabulary

BYTES = Vocabulary([bytes([n]) for n in range(256)], [bytes([n]) for n in range(256)], False)
WORDS = Vocabulary([b"st", b"op", b"s", b"!", "é".encode()[:1], "é".encode()[1:]], [b""] * 6, False)
some = settings(max_examples=60, deadline=None)


def cuts(length: int, seed: Sequence[int]) -> list[int]:
    return sorted({0, length, *(n % (length + 1) for n in seed)})


def parse(vocabulary: Vocabulary, ids: Sequence[int], seed: Sequence[int], stops: Sequence[str] = ()) -> str:
    parser = TextParser(vocabulary, stops, wants_tokens=False)
    edges = cuts(len(ids), seed)
    text = "".join(parser.push(ids[a:b], ()).text for a, b in pairwise(edges))
    return text + parser.close().text


@some
@given(st.lists(st.integers(0, 420)), st.lists(st.integers(0, 500), max_size=5))
def test_text_equals_the_references_decoding_however_tokens_are_batched(
    codec: Codec, reference: Tokenizer, a_shape, ids: list[int], seed: list[int]
) -> None:
    parser = codec.new_parser(a_shape())
    edges = cuts(len(ids), seed)
    text = "".join(parser.push(ids[a:b], ()).text for a, b in pairwise(edges)) + parser.close().text
    assert parser.completion_tokens == len(ids)
    expected = reference.decode(ids, skip_special_tokens=True)
    # A character that the end of the answer cut off is dropped; the reference shows U+FFFD for it.
    assert expected == text or expected == text + "\N{REPLACEMENT CHARACTER}"


@some
@given(st.text(max_size=60), st.lists(st.integers(0, 200), max_size=8))
def test_valid_utf8_in_any_pieces_never_shows_a_replacement(text: str, seed: list[int]) -> None:
    assert parse(BYTES, text.encode(), seed) == text


def test_a_generated_replacement_character_is_shown() -> None:
    assert parse(BYTES, "a\N{REPLACEMENT CHARACTER}b".encode(), []) == "a\N{REPLACEMENT CHARACTER}b"


def test_bytes_that_never_form_a_character_are_not_withheld() -> None:
    parser = TextParser(BYTES, (), wants_tokens=False)
    shown = sum(len(parser.push([0x80], ()).text) for _ in range(1000))
    assert shown == 1000


def test_special_tokens_are_skipped_and_unknown_ids_add_nothing(codec: Codec, reference: Tokenizer, a_shape) -> None:
    parser = codec.new_parser(a_shape())
    ids = [0, *reference.encode("fox").ids, 1, 2, 999_999]
    assert parser.push(ids, ()).text == "fox"
    think = reference.token_to_id("<think>")
    assert parser.push([think], ()).text == "<think>"  # added, but not special: as the reference decodes it


def first_complete(text: str, stops: Sequence[str]) -> str:
    """What one looking at the growing text character by character would have shown."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


@settings(max_examples=200, deadline=None)
@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(0, 60), max_size=10),
)
def test_stop_strings_cut_at_the_first_complete_one(text: str, stops: list[str], seed: list[int]) -> None:
    assert parse(BYTES, text.encode(), seed, stops) == first_complete(text, stops)


@some
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4))
def test_only_what_may_become_a_stop_string_is_withheld(text: str, stops: list[str]) -> None:
    scanner = StopStrings(stops)
    shown = ""
    for end, character in enumerate(text, 1):
        new, found = scanner.push(character)
        shown += new
        if found:
            return
        ends = (length for length in range(end, 0, -1) if any(s.startswith(text[end - length : end]) for s in stops))
        assert len(shown) == end - next(ends, 0)


def test_a_stop_string_over_token_borders_is_told_and_ends_the_count() -> None:
    parser = TextParser(WORDS, ["stop!"], wants_tokens=False)
    assert parser.push([2, 0], ()).text == "s"
    assert parser.push([1], ()).text == ""
    assert parser.push([3, 2, 2], ()).text == ""
    assert (parser.stop_string, parser.completion_tokens) == ("stop!", 4)
    assert parser.push([2], ()).text == "" and parser.close().text == ""


def test_text_before_an_unfinished_stop_string_comes_at_the_end() -> None:
    parser = TextParser(WORDS, ["stop!"], wants_tokens=False)
    assert parser.push([0, 1], ()).text == ""
    assert parser.close().text == "stop"


def logprob(value: float) -> TokenLogprob:
    return TokenLogprob(value, (), ())


def test_logprobs_wait_for_the_text_of_their_token() -> None:
    parser = TextParser(BYTES, ["xy"], wants_tokens=True)
    delta = parser.push(list(b"ax"), [logprob(-1), logprob(-2)])
    assert (delta.text, [t.logprob for t in delta.tokens]) == ("a", [-1])
    delta = parser.push(list(b"b"), [logprob(-3)])
    assert (delta.text, [t.logprob for t in delta.tokens]) == ("xb", [-2, -3])
    delta = parser.push(list(b"cxyz"), [logprob(-4), logprob(-5), logprob(-6), logprob(-7)])
    assert (delta.text, [t.logprob for t in delta.tokens]) == ("c", [-4])
    assert parser.close().tokens == []


def test_a_logprob_that_is_missing_reads_as_impossible() -> None:
    parser = TextParser(BYTES, (), wants_tokens=True)
    assert parser.push([97], ()).tokens[0].logprob == -9999.0


@pytest.mark.parametrize("count", [2000, 4000])
def test_long_answers_with_stop_strings_hold_little(count: int) -> None:
    scanner = StopStrings(["a" * 500 + "b", "c" * 1000])
    shown = sum(len(scanner.push("a")[0]) for _ in range(count))
    assert shown == count - 500
