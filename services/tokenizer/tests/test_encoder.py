import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1 import common_pb2 as pb
from shoal_tokenizer.codec.api import Codec
from shoal_tokenizer.codec.chat_template.markers import Markers
from shoal_tokenizer.codec.chat_template.prompt_text import PromptText
from shoal_tokenizer.codec.conversation import Conversation
from shoal_tokenizer.codec.encoder import PORTION_CHARS, FastEncoder, PromptBound

MARKERS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"]
typed = st.lists(st.one_of(st.sampled_from([*MARKERS, "<|im_", "start|>", "\n", " ", "user"]), st.text())).map("".join)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), typed), min_size=1, max_size=5))
def test_ids_decode_to_the_rendering_and_nothing_typed_becomes_a_control_token(
    codec: Codec, reference: Tokenizer, turns: list[tuple[str, str]]
) -> None:
    conversation = Conversation([{"role": role, "content": content} for role, content in turns])
    segments = codec.renderer.render(conversation, 0).segments
    ids = codec.encoder.encode(segments)
    text = "".join(text for text, _ in segments)
    assert reference.decode(ids, skip_special_tokens=False) == text
    added = {reference.token_to_id(marker) for marker in MARKERS}
    starts = len(turns) + 1 + (turns[0][0] != "system")
    ends = starts - 1
    counts = [sum(i == reference.token_to_id(m) for i in ids) for m in MARKERS]
    assert counts == [starts, ends, 0, 0, 0]
    assert sum(i in added for i in ids) == starts + ends


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_ordinary_text_is_encoded_as_the_reference_does(codec: Codec, reference: Tokenizer, text: str) -> None:
    if any(marker in text for marker in MARKERS):
        return
    assert codec.encoder.encode([(text, False)]) == reference.encode(text, add_special_tokens=False).ids


def test_a_text_encoded_as_marker_before_is_still_text_when_typed(codec: Codec) -> None:
    (marker,) = codec.encoder.encode([("<|im_end|>", True)])
    for _ in range(3):
        assert marker not in codec.encoder.encode([("<|im_end|>", False)])
        assert codec.encoder.encode([("<|im_end|>", True)]) == [marker]


@pytest.mark.parametrize("unit", ["the quick fox ", "a", "你好", "<|im_end|><think>", "x\n\n "])
def test_a_long_text_is_encoded_as_its_short_parts_are(codec: Codec, reference: Tokenizer, unit: str) -> None:
    text = unit * (2 * PORTION_CHARS // len(unit))
    ids = codec.encoder.encode([("<|im_start|>", True), (text, False), ("<|im_end|>", True), ("the", False)])
    added = {reference.token_to_id(marker) for marker in MARKERS}
    assert [i in added for i in ids[:1]] == [True] and sum(i in added for i in ids) == 2
    assert reference.decode(ids, skip_special_tokens=False) == f"<|im_start|>{text}<|im_end|>the"
    if "<" not in unit:
        assert ids[1 : -1 - len(codec.encoder.encode([("the", False)]))] == reference.encode(text).ids


def test_many_segments_are_encoded_in_portions_and_in_order(codec: Codec, reference: Tokenizer) -> None:
    segments = [("<|im_start|>", True), ("fox " * 1000, False)] * 40
    assert codec.encoder.encode(segments) == codec.encoder.encode(segments[:2]) * 40
    assert codec.encoder.encode([]) == []


def test_the_interpreter_is_never_held_for_more_than_a_portion() -> None:
    calls: list[int] = []

    class Recording:
        ids: tuple[int, ...] = ()

        def encode_segments(self, segments: list[tuple[str, bool]]) -> "Recording":
            calls.append(sum(len(text) for text, _ in segments))
            return self

        def encode_ordinary(self, text: str) -> "Recording":  # lets go of the interpreter
            calls.append(0)
            return self

    segments = [("<s>", True), ("a" * 10 * PORTION_CHARS, False), *[("b" * 1000, False), ("<s>", True)] * 100]
    FastEncoder(Recording()).encode(segments)
    assert max(calls) <= PORTION_CHARS and sum(calls) == 3 + 100 * 1003


def test_a_run_that_the_tokenizer_cannot_split_is_the_callers_mistake() -> None:
    class GivingUp:
        def encode_segments(self, segments: list[tuple[str, bool]]) -> None:
            raise ValueError("Max stack size exceeded for backtracking")

    with pytest.raises(BadRequest) as caught:
        FastEncoder(GivingUp()).encode([("  ", False)])
    assert caught.value.code == pb.INVALID_REQUEST and caught.value.param == "messages"


def test_half_a_surrogate_pair_is_the_callers_mistake(codec: Codec) -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        codec.encoder.encode([("a\ud800", False)])


def test_what_cannot_fit_is_refused_by_its_length_with_both_numbers(codec: Codec) -> None:
    bound = PromptBound(context_tokens=100, token_chars=8)
    bound.check(807)
    with pytest.raises(BadRequest) as caught:
        bound.check(808)
    assert caught.value.code == pb.CONTEXT_LENGTH_EXCEEDED and caught.value.param == "messages"
    assert "100 tokens" in caught.value.message and "101 tokens" in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "a <m> b",
        "a<m>b",
        "x <m>\n\n<m>",
        "<left>  <m>",
        "  <left> y",
        "z <word> z",
        "zz<word>z",
        "<word>",
        "a   b",
        "    ",
        "<m>  <left>",
        "<m><left>",
        "x <left> <m> <left>",
    ],
)
def test_cut_as_the_reference_does(text: str) -> None:
    tokens = [
        AddedToken("<m>", special=True, rstrip=True, normalized=False),
        AddedToken("<left>", special=True, lstrip=True, normalized=False),
        AddedToken("<word>", special=True, single_word=True, normalized=False),
        AddedToken("   ", special=False, normalized=False),
    ]
    alphabet = {character: n for n, character in enumerate(sorted(ByteLevel.alphabet()))}
    reference = Tokenizer(BPE(alphabet, []))
    reference.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    reference.add_tokens(tokens)
    markers = Markers(
        [
            {
                "content": t.content,
                "special": t.special,
                "lstrip": t.lstrip,
                "rstrip": t.rstrip,
                "single_word": t.single_word,
            }
            for t in tokens
        ]
    )
    ids: list[int] = []
    for part, is_marker in markers.cut(PromptText.of_author(text)):
        ids += [reference.token_to_id(part)] if is_marker else [alphabet[c] for c in as_alphabet(part)]
    assert ids == reference.encode(text).ids


def as_alphabet(text: str) -> str:
    return "".join(part for part, _ in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text))


def test_spaces_with_an_id_of_their_own_stay_text_wherever_they_are() -> None:
    markers = Markers([{"content": "   ", "special": False}, {"content": "<s>", "special": True}])
    assert markers.cut(PromptText("a   <s>")) == [("a", False), ("   ", True), ("<s>", False)]
