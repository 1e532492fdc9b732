"""Encoding the pieces of a rendered prompt: the same for every model family."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import fastokens

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1.common_pb2 import CONTEXT_LENGTH_EXCEEDED, INVALID_REQUEST
from shoal_tokenizer.codec.api import Segment

PORTION_CHARS = 32_768  # about ten milliseconds, also of the worst text


@dataclass(frozen=True, slots=True)
class PromptBound:
    """What cannot fit into the model's context however it is encoded: a token has only so many characters.

    Encoding takes seconds for megabytes of hostile text; what is refused by its length alone costs nothing.
    """

    context_tokens: int
    token_chars: int  # of the longest token

    def check(self, chars: int) -> None:
        """BadRequest (CONTEXT_LENGTH_EXCEEDED) for a prompt of so many characters that it cannot fit."""
        least_tokens = chars // self.token_chars
        if least_tokens > self.context_tokens:
            raise BadRequest(
                CONTEXT_LENGTH_EXCEEDED,
                f"This model's maximum context length is {self.context_tokens} tokens. However, your messages have "
                f"{chars} characters, which are {least_tokens} tokens at least. Please reduce the length of the "
                "messages.",
                param="messages",
            )


class FastEncoder:
    """``SegmentEncoder`` on fastokens; shared by all threads.

    fastokens holds the interpreter's lock while it encodes segments, and with it the loop that formats answers; it
    lets go of it for one ordinary text. So segments are given to it in portions, and a long text by itself.
    """

    def __init__(self, tokenizer: fastokens.Tokenizer, bound: PromptBound | None = None) -> None:
        self._tokenizer = tokenizer
        self._bound = bound

    def encode(self, segments: Sequence[Segment]) -> list[int]:
        if self._bound is not None:
            self._bound.check(sum(len(text) for text, _is_control in segments))
        ids: list[int] = []
        try:
            for portion in _portions(segments):
                ids += self._encode_portion(portion)
        except UnicodeEncodeError as error:
            raise BadRequest(
                INVALID_REQUEST,
                "The messages have half of a surrogate pair (\\ud800 to \\udfff), which is no character.",
                param="messages",
            ) from error
        except ValueError as error:  # fastokens: its expressions gave up, as on a million spaces in a row
            raise BadRequest(
                INVALID_REQUEST,
                "The messages have a run of characters that is too long to be split into tokens.",
                param="messages",
            ) from error
        return ids

    def _encode_portion(self, portion: Sequence[Segment]) -> list[int]:
        text, is_control = portion[0]
        if len(text) > PORTION_CHARS and not is_control:
            ids: list[int] = self._tokenizer.encode_ordinary(text).ids
        else:
            ids = self._tokenizer.encode_segments(list(portion)).ids
        return ids


def _portions(segments: Sequence[Segment]) -> Iterator[Sequence[Segment]]:
    """Runs of segments of ``PORTION_CHARS`` together; a longer segment is a portion of its own."""
    start, chars = 0, 0
    for index, (text, _is_control) in enumerate(segments):
        if index > start and chars + len(text) > PORTION_CHARS:
            yield segments[start:index]
            start, chars = index, 0
        chars += len(text)
    if start < len(segments):
        yield segments[start:]
