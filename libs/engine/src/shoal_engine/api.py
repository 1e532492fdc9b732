"""One interface to an inference engine; ``vllm`` and ``scripted`` implement it, one contract suite proves both.

Token ids in, token ids out: no engine sees text. Life of an engine, in this order:

1. ``start`` once. It returns when requests can be served and raises EngineFailed when that never will be.
   After a failed ``start``, ``stop`` must still be called and frees what was half built.
2. ``prefill`` and ``generate`` any number of times, concurrently, from one event loop.
3. ``stop`` once. Requests still running end with ``FinishReason.CANCEL``. Idempotent.

Promises that hold in every implementation (testkit/suites/engine.py checks each):

* A request id is used once at a time; a second concurrent use raises ValueError before anything runs.
* ``generate`` yields at least one Step with ``finish`` set, which is the last, unless it raises.
* ``hit_tokens`` of the first Step counts prompt tokens that were not computed for this request.
* ``abort`` is idempotent, safe for unknown ids, and does not wait for the engine: the request is gone at
  the next step border, its stream ends with ``FinishReason.CANCEL``, nothing of it stays pinned.
* Closing the iterator of ``generate``, or cancelling the task that awaits ``prefill``, aborts the request once.
* KV that cannot be loaded is computed; the output is the same. It is counted in ``load().failed_loads``.
* At temperature 0 in float32 the tokens do not depend on what was hit.
* ``load`` answers from memory, never blocks and never raises.
* ``prefetch`` computes nothing, changes no output and raises nothing but CancelledError.
* With a constraint every token is one that it allows, and the answer ends with a stop token only where it is complete.
  One that cannot be read or held raises ConstraintRefused before anything runs, and the engine serves on. A constraint
  begins with the first token of an answer: with resumed tokens it is refused. ``prefill`` does not look at it.

docs/decisions/0006-blocks.md, docs/decisions/0016-deadlines-and-typed-failures.md,
docs/decisions/0032-constraints-are-structural-tags.md
"""

import enum
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class EngineFailed(Exception):
    """The engine could not start, died, or failed one request. The message is for operators, not for clients."""


class RequestRefused(Exception):
    """The engine will never be able to run this request as it is (longer than the context, for example)."""


class ConstraintRefused(RequestRefused):
    """The engine cannot hold this constraint. The message is for the caller: it says what to change."""


class FinishReason(enum.Enum):
    """Why a stream ended."""

    STOP = "stop"  # a stop token id; it is told in Step.stop_token_id and not part of token_ids
    LENGTH = "length"  # max_tokens or the context is used up
    CANCEL = "cancel"  # aborted, or the engine stopped


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when to stop; None means the model's own default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # alternatives told with each token; 0 tells only the chosen one
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    constraint: str | None = None  # a structural tag as JSON; None: anything may be generated


@dataclass(frozen=True, slots=True)
class Item:
    """One non-text part of a prompt; its placeholders stand at ``offset_tokens`` and are already expanded."""

    offset_tokens: int
    length_tokens: int
    identifier: str


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt. ``resumed_token_ids`` were generated elsewhere: they extend the prompt and count towards
    ``max_tokens``; they are not yielded again."""

    request_id: str
    token_ids: Sequence[int]
    sampling: Sampling = Sampling()
    cache_salt: str = ""
    items: tuple[Item, ...] = ()
    resumed_token_ids: Sequence[int] = ()


MAX_CONSTRAINT_CHARS = 1 << 20


def check_constraint(request: EngineRequest) -> None:
    """ConstraintRefused for a constraint that no engine holds, whatever it says."""
    constraint = request.sampling.constraint
    if constraint is None:
        return
    if request.resumed_token_ids:
        raise ConstraintRefused("an answer under a constraint cannot go on after tokens that were generated elsewhere")
    if len(constraint) > MAX_CONSTRAINT_CHARS:
        raise ConstraintRefused(
            f"schemas and tools make a constraint of {len(constraint)} characters; "
            f"at most {MAX_CONSTRAINT_CHARS} are held"
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one token: the chosen one and the most likely ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of the engine brought for one request."""

    token_ids: Sequence[int]
    hit_tokens: int | None = None  # set in the first Step only
    logprobs: Sequence[TokenLogprobs] | None = None  # one per token when the request asked
    finish: FinishReason | None = None
    stop_token_id: int | None = None  # with STOP: which token ended it


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """KV of the prompt is computed and handed to the store (which may still be writing it)."""

    hit_tokens: int
    miss_tokens: int
    first_token: int | None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A reading of the engine. None: unknown, never zero."""

    running_requests: int
    waiting_requests: int
    cached_tokens: int  # total length of running requests, prompt and answer
    max_cached_tokens: int | None  # room in KV memory
    failed_loads: int  # requests, since start, whose stored KV could not be loaded and was computed
    failed_prefetches: int = 0  # since start; their requests load by themselves
    is_store_lost: bool = False  # as of the last step: nothing can be loaded or stored, everything is computed


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What lies in the node's DRAM after ``prefetch``; zeros when nothing is stored, or no store is there.

    ``blocks`` of the prompt, those that lay there before included: a store does not tell them apart.
    """

    blocks: int = 0
    took_ms: int = 0


class StateKind(enum.Enum):
    """What a group of layers needs of a prefix."""

    FULL = "full"  # the state of every block
    SLIDING_WINDOW = "sliding_window"  # that of the last ``window_tokens`` only


@dataclass(frozen=True, slots=True)
class StateGroup:
    """One object group of the store: layers whose state is kept and loaded together."""

    object_group_id: int
    kind: StateKind
    window_tokens: int = 0
    is_replayable: bool = False  # the engine can compute a missing window again from its last tokens


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """Fixed facts of a started engine. ``pool`` names everything that can share its KV (decision 0002)."""

    model: str
    pool: str
    block_tokens: int
    max_context_tokens: int
    max_running_requests: int
    groups: tuple[StateGroup, ...] = ()  # of the store's objects; empty without a store
    store_instance_id: str = ""  # of the node's store, as kvindex knows it; empty when it is not known


class Engine(Protocol):
    """See the module docstring for the promises."""

    @property
    def description(self) -> EngineDescription:
        """Valid after ``start``."""

    async def start(self) -> None:
        """Raises EngineFailed."""

    async def prefill(self, request: EngineRequest) -> PrefillResult:
        """Compute the prompt and one token. Raises RequestRefused, EngineFailed; CancelledError when aborted."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[Step, None]:
        """Stream tokens as steps complete. Raises RequestRefused before the first Step, EngineFailed at any time."""

    async def prefetch(self, request: EngineRequest) -> Prefetched:
        """Bring what only the shared level has of this prompt into the node's DRAM, while the request waits."""

    async def abort(self, request_id: str) -> None:
        """Stop a request at the next step border."""

    def load(self) -> EngineLoad:
        """What the engine is busy with now."""

    async def check(self) -> None:
        """Raises EngineFailed when the engine can no longer serve."""

    async def stop(self) -> None:
        """End everything, free memory and processes."""
