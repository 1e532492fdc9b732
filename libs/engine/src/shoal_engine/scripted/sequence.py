"""One request inside the scripted engine: its tokens, what of them is computed, and what waits for its reader.

The next token is a pure function of every token before it (resumed ones included), the items and the size of the
vocabulary, or, with a script or a constraint, of the prompt and its place in the answer. So it makes no difference
which engine computed what, and any mix of prefill, hand-off, resume and recompute can be checked against one
uninterrupted run. Temperature, penalties and seeds are accepted and change nothing.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal_contracts.ids import pack_u32
from shoal_engine.api import EngineRequest, FinishReason, Item, RequestRefused, Step, TokenLogprobs
from shoal_engine.scripted.constraint import ConstrainedAnswer
from shoal_engine.scripted.script import PlayedAnswer
from shoal_engine.scripted.store import BlockKey
from shoal_kvblocks import block_hashes, extend_hashes, split_hashes

CHOSEN_LOGPROB = -0.25
BEST_OTHER_LOGPROB = -2.0


class TokenChain:
    """The choice of the next token after a run of tokens. Adding a token costs the same however long the run is."""

    def __init__(self, vocabulary_tokens: int, token_ids: Sequence[int], items: tuple[Item, ...] = ()) -> None:
        self._vocabulary_tokens = vocabulary_tokens
        self._hash = hashlib.blake2b(digest_size=8)
        for item in items:
            self._hash.update(f"{item.offset_tokens} {item.length_tokens} {item.identifier}\n".encode())
        self._hash.update(pack_u32(token_ids))

    def choose(self) -> int:
        return int.from_bytes(self._hash.digest(), "little") % self._vocabulary_tokens

    def add(self, token_id: int) -> None:
        self._hash.update(token_id.to_bytes(4, "little"))


def invented_logprobs(token_id: int, alternatives: int, vocabulary_tokens: int) -> TokenLogprobs:
    """A distribution with the chosen token on top; its probabilities sum up to less than one."""
    others = [((token_id + i) % vocabulary_tokens, BEST_OTHER_LOGPROB + 1 - i) for i in range(1, alternatives)]
    top = ((token_id, CHOSEN_LOGPROB), *others)[:alternatives]
    return TokenLogprobs(CHOSEN_LOGPROB, top)


class StepBuffer:
    """What the step loop made and the reader has not taken yet, merged into one Step.

    Written by the step loop, read by ``generate``, both on one loop. Bounded by the context of the model.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._hit_tokens: int | None = None
        self._finish: FinishReason | None = None
        self._stop_token_id: int | None = None
        self._failure: BaseException | None = None
        self._is_ready = asyncio.Event()

    def add(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._is_ready.set()

    def tell_hit(self, hit_tokens: int) -> None:
        """Goes out with the next step."""
        self._hit_tokens = hit_tokens

    def finish(self, reason: FinishReason, stop_token_id: int | None = None) -> None:
        self._finish, self._stop_token_id = reason, stop_token_id
        self._is_ready.set()

    def fail(self, failure: BaseException) -> None:
        self._failure = failure
        self._is_ready.set()

    async def take(self) -> Step:
        """Wait for something, then take all of it. Raises what ``fail`` was given."""
        await self._is_ready.wait()
        self._is_ready.clear()
        if self._failure is not None:
            raise self._failure
        step = Step(
            self._token_ids, self._hit_tokens, self._logprobs or None, self._finish, stop_token_id=self._stop_token_id
        )
        self._token_ids, self._logprobs, self._hit_tokens = [], [], None
        return step


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Owned by the step loop from ``generate``'s first step to its end, whichever end that is."""

    request: EngineRequest
    chain: TokenChain
    token_ids: list[int]  # prompt, resumed and new ones
    hashes: bytes  # of the whole blocks of token_ids, as far as they were needed
    max_tokens: int
    stop_token_ids: frozenset[int]
    played: PlayedAnswer | None = None
    constrained: ConstrainedAnswer | None = None
    steps: StepBuffer = field(default_factory=StepBuffer)
    computed_tokens: int = 0  # their KV is in the engine
    stored_blocks: int = 0
    loaded_at_s: float = 0.0
    is_hit_told: bool = False
    is_aborted: bool = False
    is_over: bool = False

    @property
    def is_decoding(self) -> bool:
        return self.computed_tokens == len(self.token_ids) - 1

    @property
    def uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.computed_tokens

    @property
    def answer_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.token_ids)

    def choose(self) -> int:
        """The next token. Raises RequestRefused where the script says what the constraint forbids."""
        token_id = self._wish()
        if self.constrained is None:
            return token_id
        if self.played is None:
            token_id = self.constrained.choose(token_id)
        if not self.constrained.accept(token_id):
            raise RequestRefused("the script has an answer that the constraint of the request does not allow")
        return token_id

    def _wish(self) -> int:
        if self.played is not None:
            if self.answer_tokens < len(self.played.token_ids):
                return self.played.token_ids[self.answer_tokens]
            if self.played.is_ended and self.stop_token_ids:
                return min(self.stop_token_ids)
        return self.chain.choose()

    def keys(self, pool: str, block_tokens: int, tokens: int, first_block: int = 0) -> list[BlockKey]:
        """Names of the whole blocks among the first ``tokens`` tokens, from ``first_block`` on."""
        blocks = tokens // block_tokens
        if len(self.hashes) // 32 < blocks:
            self.hashes = extend_hashes(
                self.hashes, pack_u32(self.token_ids[: blocks * block_tokens]), block_tokens, self.request.items
            )
        names = split_hashes(self.hashes)[first_block:blocks]
        return [BlockKey(pool, name, self.request.cache_salt) for name in names]


def enter(request: EngineRequest, vocabulary_tokens: int, block_tokens: int, eos_token_id: int | None) -> LiveRequest:
    """A request at the door of the engine."""
    sampling = request.sampling
    token_ids = [*request.token_ids, *request.resumed_token_ids]
    stops = set(sampling.stop_token_ids)
    if eos_token_id is not None and not sampling.ignore_eos:
        stops.add(eos_token_id)
    return LiveRequest(
        request=request,
        chain=TokenChain(vocabulary_tokens, token_ids, request.items),
        token_ids=token_ids,
        hashes=block_hashes(pack_u32(token_ids), block_tokens, request.items),
        max_tokens=sampling.max_tokens if sampling.max_tokens is not None else 1 << 32,
        stop_token_ids=frozenset(stops),
    )
