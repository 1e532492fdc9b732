"""What is known of an answer so far: enough to go on with it at another worker or another tokenizer.

A decode worker is given every token that was generated. A tokenizer is given as prior those tokens whose events the
client has, and the rest as if they came now; so no token is lost and none is shown twice.
docs/decisions/0013-tokens-travel-in-batches.md
"""

from shoal_contracts.errors import Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.request import TOKEN_BYTES, TokenBatch


class Transcript:
    """Tokens of one answer, in order, and how far the client has seen them."""

    def __init__(self) -> None:
        self._token_ids = bytearray()
        self._logprobs: list[bytes] = []  # of the tokens from _shown_tokens on
        self._shown_tokens: int | None = 0  # None: events went out and nobody said how far they reach
        self._has_events = False
        self.shown_events = 0

    @property
    def completion_tokens(self) -> int:
        return len(self._token_ids) // TOKEN_BYTES

    @property
    def token_ids(self) -> bytes:
        return bytes(self._token_ids)

    @property
    def has_events(self) -> bool:
        """The client has the opening events."""
        return self._has_events

    def add(self, batch: TokenBatch) -> None:
        """Tokens that were generated."""
        self._token_ids += batch.token_ids
        self._logprobs.extend(batch.logprobs)

    def show(self, parsed_tokens: int | None, event_count: int) -> None:
        """The client gets so many more events, which cover the first ``parsed_tokens``."""
        self._has_events = True
        self.shown_events += event_count
        if parsed_tokens is None:
            self._shown_tokens = None
            return
        if self._shown_tokens is not None and parsed_tokens > self._shown_tokens:
            del self._logprobs[: parsed_tokens - self._shown_tokens]
            self._shown_tokens = parsed_tokens

    def prior_token_ids(self) -> bytes:
        """Tokens that the client has seen. Unavailable when nobody knows which these are."""
        return bytes(self._token_ids[: self._shown() * TOKEN_BYTES])

    def rest(self) -> TokenBatch:
        """Tokens that the client has not seen."""
        return TokenBatch(bytes(self._token_ids[self._shown() * TOKEN_BYTES :]), tuple(self._logprobs))

    def _shown(self) -> int:
        if self._shown_tokens is None:
            raise Unavailable(pb.UNAVAILABLE, "the connection to a part of the system broke; send the request again")
        return self._shown_tokens
