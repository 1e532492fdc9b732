"""What the lifecycle needs of the outside: four peers and a client. ``links`` and ``presence`` implement them.

All of it runs on one event loop. Sinks are called from a link's reader and must not block. A sink hears nothing more
after its stream's end (``on_finished``, ``on_closed``, ``on_lost``, ``on_failed``) or after ``cancel`` and ``drop``.
"""

import enum
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from shoal_contracts.errors import ShoalError
from shoal_gateway.request import (
    BlockClaim,
    BodyToEncode,
    HistoryNeeded,
    Matched,
    Opening,
    Placement,
    PrefillDone,
    PrefillWork,
    Prompt,
    ServedModel,
    Storage,
    StoredResponse,
    TokenBatch,
)
from shoal_policy import DecodeWorkerView


class EndReason(enum.Enum):
    """Why generating ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCEL = "cancel"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a generation as it is told to the tokenizer."""

    reason: EndReason
    failure: ShoalError | None = None  # with FAILURE
    receipt_json: bytes | None = None
    hit_tokens: int | None = None
    other_choices: tuple[bytes, ...] = ()  # what the tokenizer kept of each, with the first choice


class TokenSink(Protocol):
    """Who hears of a placed request."""

    def on_started(self, hit_tokens: int) -> None: ...

    def on_tokens(self, batch: TokenBatch) -> None: ...

    def on_finished(self, reason: EndReason, failure: ShoalError | None) -> None: ...

    def on_lost(self, error: ShoalError) -> None:
        """The connection to the worker broke; the worker aborts by itself."""


class PlacedRequest(Protocol):
    """A request on a decode worker."""

    @property
    def instance_id(self) -> str: ...

    async def accepted(self) -> None:
        """Return when the worker took it. Raises what it was refused with, Unavailable when the worker is lost."""

    def cancel(self) -> None:
        """Stop it, once; nothing when it has ended."""


class DecodeFleet(Protocol):
    """Every decode worker."""

    def models(self) -> list[ServedModel]: ...

    def workers(self, pool: str) -> list[DecodeWorkerView]: ...

    def place(self, instance_id: str, placement: Placement, sink: TokenSink) -> PlacedRequest:
        """Offer a request. Unavailable when the worker is not there any more."""

    async def room(self, timeout_s: float) -> None:
        """Return when a worker may have got room, at the latest after ``timeout_s``."""


class EventSink(Protocol):
    """Who hears of a stream of events."""

    def on_events(self, events: bytes, parsed_tokens: int | None, event_count: int) -> None: ...

    def on_stopped(self) -> None:
        """A stop string was found: no event of a later token will come."""

    def on_closed(self, completion_tokens: int, kept_body: bytes | None) -> None: ...

    def on_failed(self, error: ShoalError) -> None:
        """This stream cannot go on there, or the tokenizer is lost."""


class EventStream(Protocol):
    """One request's stream at a tokenizer; does nothing any more after its end."""

    @property
    def instance(self) -> str:
        """One life of one instance: after a restart it is another one."""

    def send(self, batch: TokenBatch) -> None: ...

    def finish(self, ending: Ending) -> None: ...

    def drop(self) -> None:
        """Forget it, once; nothing when it has ended."""


class TokenizerFleet(Protocol):
    """Every tokenizer."""

    async def encode(self, work: BodyToEncode) -> Prompt | HistoryNeeded: ...

    async def count(self, work: BodyToEncode) -> bytes:
        """How many tokens the prompt has, in the shape of the API."""

    def open(self, opening: Opening, sink: EventSink, *, avoid: frozenset[str]) -> EventStream:
        """Unavailable when no tokenizer serves the model but those to ``avoid``."""


class PrefillQueue(Protocol):
    """The prefill workers, behind their queue."""

    def find_fallback(self, pool: str, tier: str) -> "Fallback | None":
        """Why no job of this kind can be queued now; None: it can."""

    async def compute(self, work: PrefillWork, timeout_s: float) -> PrefillDone:
        """One attempt. Raises what the answer says, Unavailable when it is missing, Refused when the queue is full."""

    def cancel(self, request_id: str, pool: str) -> None:
        """Take queued jobs out and abort what computes; nothing for unknown requests. Does not wait."""


class KvIndex(Protocol):
    """The directory of stored blocks."""

    async def match(self, claim: BlockClaim, *, hold_s: float, pending_s: float) -> Matched:
        """Leading blocks that are stored; they stay for ``hold_s``. The rest counts as computed by this request for
        ``pending_s``, unless another one has it. Raises Unavailable."""

    async def await_stored(self, claim: BlockClaim, block: int, wait_s: float) -> bool:
        """Whether this block of the claim is stored, or becomes so within ``wait_s``. Raises what refused to say."""

    def settle(self, claim: BlockClaim) -> None:
        """Claim blocks; nobody waits for this request any more. Does not wait; a claim that cannot be delivered is
        counted and dropped."""


class ResponseStore(Protocol):
    """Responses that clients may ask for later, by tenant and id. Everything raises Unavailable when it is away."""

    @property
    def is_away(self) -> bool:
        """Nothing can be kept now; known without asking."""

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None: ...

    async def history(self, tenant: str, response_id: str) -> bytes:
        """Input and output items of the response and of all before it, oldest first, as a JSON array.

        BadRequest when one of them is not there, still runs, or when they are too many.
        """

    async def input_items(self, tenant: str, response_id: str) -> bytes | None: ...

    async def put_running(self, tenant: str, storage: Storage, budget_s: float) -> None:
        """A background response begins; after ``budget_s`` it counts as lost."""

    async def finish(self, tenant: str, response_id: str, body: bytes) -> None:
        """A running one ended. One that was deleted meanwhile, or has an end already, is left alone."""

    async def put_done(self, tenant: str, storage: Storage, body: bytes) -> None:
        """A response that ended and was not kept before."""

    async def delete(self, tenant: str, response_id: str) -> StoredResponse | None:
        """What it was; None: it was not there."""


class Client(Protocol):
    """Who asked. ``ClientConnection`` over HTTP, ``BackgroundClient`` for who does not wait, a probe inside."""

    @property
    def has_head(self) -> bool:
        """Response headers are out: an error can only be an event any more."""

    async def read_body(self) -> None:
        """Return when the whole body is here; the client holds it."""

    @property
    def body(self) -> bytes:
        """The body until ``release_body``, then nothing."""

    def release_body(self) -> None:
        """Nobody reads it any more. Idempotent."""

    async def while_present(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``; cancel it and raise Interrupted when the client leaves."""

    def begin_events(self) -> None:
        """From now on head and keep-alive may be written."""

    def put(self, events: bytes, event_count: int = 0) -> bool:
        """Queue so many events, or the body; False when too much waits already."""

    async def end(self, receipt_json: bytes | None) -> None:
        """All is put: write the rest."""


class Fallback(enum.Enum):
    """What did not go the way it should, without failing the request. A metric label."""

    INDEX_UNKNOWN = "index_unknown"
    AFFINITY_MISSED = "affinity_missed"
    NATS_AWAY = "nats_away"
    NO_PREFILL_WORKER = "no_prefill_worker"
    PREFILL_QUEUE_FULL = "prefill_queue_full"
    PREFILL_FAILED = "prefill_failed"
    PREFILL_REPEATED = "prefill_repeated"
    STORE_UNKNOWN = "store_unknown"
    PLACEMENT_REFUSED = "placement_refused"
    HIT_LOST = "hit_lost"
    DECODE_RESUMED = "decode_resumed"
    TOKENIZER_RESUMED = "tokenizer_resumed"
    RESPONSE_NOT_STORED = "response_not_stored"
