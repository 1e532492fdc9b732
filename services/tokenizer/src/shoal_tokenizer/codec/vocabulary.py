"""What each token id adds to an answer, as bytes.

Built once from ``tokenizer.json`` for the two kinds of decoder that open models have: byte-level BPE, and pieces
with ``▁`` for a space and ``<0xNN>`` for a byte. A third kind is refused at load rather than decoded wrongly.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class UnknownDecoder(Exception):
    """``tokenizer.json`` asks for a way of decoding that is not known here."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``shown[i]`` is what token ``i`` adds to the text, ``spelled[i]`` how it is named in log probabilities."""

    shown: Sequence[bytes]  # empty for special tokens, as with ``skip_special_tokens``
    spelled: Sequence[bytes]
    is_first_space_dropped: bool

    def __len__(self) -> int:
        return len(self.shown)

    def spelling(self, token_id: int) -> bytes:
        return self.spelled[token_id] if token_id < len(self.spelled) else b""

    def join(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of several tokens. Ids beyond the vocabulary (padding of the model's head) add nothing."""
        try:
            return b"".join(map(self.shown.__getitem__, token_ids))
        except IndexError:
            return b"".join(self.shown[i] for i in token_ids if i < len(self.shown))


def read_vocabulary(tokenizer: Mapping[str, Any]) -> Vocabulary:
    """``tokenizer`` is the parsed tokenizer.json."""
    pieces: dict[int, str] = {}
    vocab = tokenizer["model"]["vocab"]
    if isinstance(vocab, Mapping):
        pieces.update((token_id, piece) for piece, token_id in vocab.items())
    else:
        pieces.update(enumerate(piece for piece, _score in vocab))
    added = tokenizer.get("added_tokens") or []
    pieces.update((token["id"], token["content"]) for token in added)
    special = {token["id"] for token in added if token.get("special")}

    steps = _flatten(tokenizer.get("decoder"))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        to_bytes = _ByteLevel().to_bytes
        drops_space = False
    elif kinds and kinds <= _PIECE_STEPS:
        to_bytes = _Pieces(steps).to_bytes
        drops_space = "Strip" in kinds or any(s.get("prepend_scheme", "never") != "never" for s in steps)
    else:
        raise UnknownDecoder(f"the decoder {sorted(kinds) or 'null'} of tokenizer.json is not known")

    size = max(pieces, default=-1) + 1
    spelled = [b""] * size
    for token_id, piece in pieces.items():
        spelled[token_id] = piece.encode() if token_id in special else to_bytes(piece)
    shown = [b"" if token_id in special else spelling for token_id, spelling in enumerate(spelled)]
    return Vocabulary(shown, spelled, drops_space)


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flatten(part)]


class _ByteLevel:
    """GPT-2's alphabet: every byte is written as one printable character."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of |= {chr(256 + n): byte for n, byte in enumerate(others)}

    def to_bytes(self, piece: str) -> bytes:
        try:
            return bytes([self._byte_of[character] for character in piece])
        except KeyError:
            return piece.encode()  # an added token in its own spelling


class _Pieces:
    """Pieces whose text is replaced piece by piece."""

    def __init__(self, steps: Sequence[Mapping[str, Any]]) -> None:
        self._has_bytes = any(step["type"] == "ByteFallback" for step in steps)
        self._replacements: list[tuple[str, str]] = []
        for step in steps:
            if step["type"] == "Metaspace":
                self._replacements.append((step["replacement"], " "))
            elif step["type"] == "Replace":
                if "String" not in step["pattern"]:
                    raise UnknownDecoder("a decoder that replaces by a regular expression is not known")
                self._replacements.append((step["pattern"]["String"], step["content"]))
            elif step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
                raise UnknownDecoder("a decoder that strips anything but the first space is not known")

    def to_bytes(self, piece: str) -> bytes:
        if self._has_bytes and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match.group(1), 16)])
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return piece.encode()
