import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from shoal_tokenizer.codec.text_parser import TextParser
from shoal_tokenizer.codec.vocabulary import UnknownDecoder, read_vocabulary

PIECES = ["<unk>", "<0xE4>", "<0xBD>", "<0xA0>", "▁Hello", "▁world", "!", "▁"]
LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def piece_tokenizer(decoder: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({piece: n for n, piece in enumerate(PIECES)}, [], byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


@pytest.mark.parametrize(
    "decoder", [LLAMA, decoders.Metaspace(), decoders.Metaspace(prepend_scheme="never")], ids=["llama", "meta", "never"]
)
@pytest.mark.parametrize("ids", [[4, 5, 6], [8, 4, 6], [6, 4], [4, 7, 5, 8], []])
def test_pieces_decode_as_the_reference_does(decoder: Any, ids: list[int]) -> None:
    tokenizer = piece_tokenizer(decoder)
    parser = TextParser(read_vocabulary(json.loads(tokenizer.to_str())), (), wants_tokens=False)
    text = "".join(parser.push([token_id], ()).text for token_id in ids)
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


def test_bytes_spelled_as_pieces_form_characters() -> None:
    tokenizer = piece_tokenizer(LLAMA)
    parser = TextParser(read_vocabulary(json.loads(tokenizer.to_str())), (), wants_tokens=False)
    assert [parser.push([n], ()).text for n in (4, 1, 2, 3)] == ["Hello", "", "", "你"]


def test_unigram_vocabularies_are_read() -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁Hello", -1.0)], 0, False))
    tokenizer.decoder = decoders.Metaspace()
    vocabulary = read_vocabulary(json.loads(tokenizer.to_str()))
    assert vocabulary.join([1]) == b" Hello"


@pytest.mark.parametrize(
    "decoder", [None, {"type": "WordPiece"}, {"type": "Strip", "content": "x", "start": 1, "stop": 0}]
)
def test_other_decoders_are_refused(decoder: Any) -> None:
    with pytest.raises(UnknownDecoder):
        read_vocabulary({"model": {"vocab": {"a": 0}}, "decoder": decoder})
