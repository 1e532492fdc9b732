"""What a request is made of on its way through the river; plain values, no wire types.

Sampling, output state and log probabilities are opaque here: the tokenizer writes them, decode and prefill read
them, and the gateway passes the bytes through.
"""

import enum
from dataclasses import dataclass, field

from shoal_kvblocks import Item, count_hashes
from shoal_policy import TrafficClass

TOKEN_BYTES = 4
ONE_TENANT = ""  # until keys tell them apart


class Api(enum.Enum):
    """The public APIs that ask for an answer, by their paths."""

    CHAT_COMPLETIONS = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that decode workers offer now, and the pool whose KV they share."""

    name: str
    pool: str
    block_tokens: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class Storage:
    """What is kept of a Responses request; JSON that only the tokenizer and the client read.

    ``pending_body`` is the response while it is generated, ``lost_body`` what is told of it when nobody does any more.
    """

    response_id: str
    input_items: bytes
    is_background: bool
    previous_response_id: str | None
    pending_body: bytes
    lost_body: bytes


@dataclass(frozen=True, slots=True)
class BodyToEncode:
    """A body as it came. ``history`` has the items of the stored responses that it goes on with."""

    api: Api
    body: bytes
    request_id: str
    history: bytes | None = None


@dataclass(frozen=True, slots=True)
class HistoryNeeded:
    """Instead of a prompt: the body goes on with this stored response."""

    response_id: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A further answer to a prompt, generated as the first but for these."""

    sampling: bytes
    output_state: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """What Encode made of a body."""

    model: str
    token_ids: bytes  # packed little-endian uint32
    sampling: bytes
    output_state: bytes
    is_streaming: bool
    traffic_class: TrafficClass = TrafficClass.CHAT
    max_tokens: int | None = None
    items: tuple[Item, ...] = ()
    notes: tuple[str, ...] = ()  # what was changed or has no effect, for the receipt
    is_constrained: bool = False  # the engine holds the answer to a grammar
    storage: Storage | None = None  # None: nothing is kept
    other_choices: tuple[Choice, ...] = ()  # further answers that are wanted to it

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES


def loadable_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """Tokens in whole blocks that an engine may load; the last token is always computed."""
    return (prompt_tokens - 1) // block_tokens * block_tokens


@dataclass(frozen=True, slots=True)
class Blocks:
    """The whole blocks of a prompt and how many leading ones are stored; None when the index did not say."""

    hashes: bytes
    block_tokens: int
    hit_blocks: int | None = None
    dram_store_ids: tuple[str, ...] = ()  # stores that have the whole hit in DRAM
    is_claimed: bool = False  # others may wait for the rest, or for all: whoever gives it up has to say so

    @property
    def whole_blocks(self) -> int:
        return count_hashes(self.hashes)

    @property
    def miss_blocks(self) -> int:
        """Whole blocks to compute, all of them when nobody knows better."""
        return max(0, self.whole_blocks - (self.hit_blocks or 0))


@dataclass(frozen=True, slots=True)
class BlockClaim:
    """Whole blocks of one request, asked about or claimed. ``first_block`` tells whose claim ends where it has none."""

    request_id: str
    pool: str
    cache_salt: str
    hashes: bytes
    traffic_class: TrafficClass
    first_block: bytes = b""


@dataclass(frozen=True, slots=True)
class PendingRun:
    """Leading blocks of a prompt that are stored or that another request has computed now."""

    blocks: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Matched:
    """What the index said. ``pending`` is None when nobody has the block after the hit computed."""

    hit_blocks: int
    pending: PendingRun | None = None
    dram_store_ids: tuple[str, ...] = ()  # stores that have the whole hit in DRAM


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """One attempt at having a prompt computed."""

    request_id: str
    attempt: int
    pool: str
    tier: str
    cache_salt: str
    prompt: Prompt
    expected_hit_tokens: int | None
    traffic_class: TrafficClass
    budget_s: float
    dram_store_ids: tuple[str, ...] = ()  # on their nodes there is nothing to prefetch


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """A prompt is computed and, as far as ``stored`` says, in the store."""

    instance_id: str
    delivery: int
    hit_tokens: int
    miss_tokens: int
    stored: str  # yes, unknown or none
    compute_ms: int
    store_wait_ms: int
    prefetched_blocks: int = 0
    prefetch_ms: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """A request as it is offered to a decode worker."""

    request_id: str
    pool: str
    cache_salt: str
    prompt: Prompt
    resumed_token_ids: bytes
    is_local_prefill: bool
    budget_s: float

    @property
    def length_tokens(self) -> int:
        return self.prompt.prompt_tokens + len(self.resumed_token_ids) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens of one request from one step; ``logprobs`` has one opaque entry a token when the client asked."""

    token_ids: bytes
    logprobs: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Opening:
    """How a stream of events begins, also when it goes on elsewhere."""

    model: str
    output_state: bytes
    prompt_tokens: int
    hit_tokens: int
    prior_token_ids: bytes = b""
    is_resumed: bool = False
    prior_events: int = 0


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What the steps before decode found out; everything that placing and streaming need."""

    request_id: str
    model: ServedModel
    prompt: Prompt
    cache_salt: str
    deadline_s: float  # on the gateway's monotonic clock
    is_local_prefill: bool = False
    hit_tokens: int | None = None  # as prefill really loaded; None: decode will say
    promised_blocks: int = 0  # leading blocks that were said to be stored


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller wants besides the body."""

    request_id: str
    api: Api = Api.CHAT_COMPLETIONS
    tenant: str = ONE_TENANT
    wants_receipt: bool = False
    traffic_class: TrafficClass | None = None  # None: as the tokenizer found
    trace_headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it is kept. ``body`` is what the client is told of it now."""

    body: bytes
    is_running: bool
    is_background: bool
