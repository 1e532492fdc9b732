"""Steps 5 and 6: tokens of a decode worker → tokenizer → events for the client, until both have ended.

Tokens and events pass through in the links' callbacks, without a task of this request. What changes its course comes
as a signal to ``run``, in order: the end of generating, a stop string, a lost worker or tokenizer, a client that does
not read. A lost decode worker means another placement with the tokens so far; a lost tokenizer another stream with
what the client has seen as prior tokens. ``abort`` must be called at the end, however it came: it stops what is left.
Where the response is kept (``keep``), the last events wait until that is done: the client may name it in its next turn.
docs/decisions/0013-tokens-travel-in-batches.md, docs/decisions/0033-stored-responses.md
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shoal_contracts.errors import ERRORS, Interrupted, ShoalError, Unavailable
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.ports import (
    Client,
    Ending,
    EndReason,
    EventStream,
    Fallback,
    PlacedRequest,
    TokenizerFleet,
)
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import Opening, Placement, RequestPlan, TokenBatch, loadable_tokens
from shoal_gateway.resume import Transcript
from shoal_gateway.steps.place import PlaceStep
from shoal_gateway.steps.signals import (
    ClientTooSlow,
    Closed,
    Finished,
    OtherAnswers,
    Signal,
    Stopped,
    TokenizerLost,
    WorkerLost,
)
from shoal_runtime.clock import Clock

MAX_SIGNALS = 64  # each is the end of something that was started a bounded number of times
CLOSE_S = 10.0  # from the last token to the last event
END_EVENT_S = 1.0
REOPEN_EACH_S = 0.1


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Workers and tokenizers that one request may use up."""

    place_attempts: int
    event_attempts: int
    event_wait_s: float  # for another tokenizer


@dataclass(frozen=True, slots=True)
class StreamPeers:
    """Where tokens come from and where they go."""

    place: PlaceStep
    tokenizers: TokenizerFleet
    client: Client
    clock: Clock


class AnswerStream:
    """One request's answer; the sink of its placement and of its events. Owned by its Lifecycle."""

    def __init__(
        self,
        plan: RequestPlan,
        peers: StreamPeers,
        limits: StreamLimits,
        receipt: Receipt,
        describe: Callable[[], bytes | None],
    ) -> None:
        self._plan = plan
        self._peers = peers
        self._limits = limits
        self._receipt = receipt
        self._describe = describe  # the receipt for the last event, when the client wants it there
        self._signals: asyncio.Queue[Signal] = asyncio.Queue(MAX_SIGNALS)
        self._placed: PlacedRequest | None = None
        self._events: EventStream | None = None
        self._placements = 0
        self._openings = 0
        self._lost_tokenizers: frozenset[str] = frozenset()
        self._reason: EndReason | None = None  # why generating ended
        self._ending: Ending | None = None  # as the tokenizer was told
        self._others: OtherAnswers | None = None if plan.prompt.other_choices else OtherAnswers()
        self._is_too_slow = False
        self._is_stopped = False  # by a stop string
        self._held: list[tuple[bytes, int]] = []  # last events, and how many they are
        self._is_closed = False
        self.transcript = Transcript()
        self.on_first_token: Callable[[], None] | None = None
        self.keep: Callable[[bytes], Awaitable[None]] | None = None

    async def run(self) -> None:
        """Return when the client has, or will be written, every event. Raises what ended it otherwise."""
        await self._place()
        self._open()
        while True:
            signal = await self._next_signal()
            if isinstance(signal, Closed):
                self._check_tokens(signal.completion_tokens)
                await self._close(signal)
                if self._is_too_slow:  # also for the last events, which come at once
                    raise _reads_too_slowly()
                return
            await self._handle(signal)

    async def tell_end(self, reason: EndReason, failure: ShoalError | None = None) -> bool:
        """Have the tokenizer write that the answer failed, or was cancelled; also after ``abort``. False when it
        cannot, or the client would not read."""
        self._cancel_placed()
        while not self._signals.empty():
            signal = self._signals.get_nowait()
            if isinstance(signal, Closed):
                await self._close(signal)
        if self._is_closed or self._is_too_slow:
            return self._is_closed
        self._ending = Ending(reason, failure=failure, receipt_json=self._describe())
        try:
            if self._events is None:
                self._open()
            else:
                self._events.finish(self._ending)
            async with asyncio.timeout(END_EVENT_S):
                closed = await self._next_closed()
        except (TimeoutError, ShoalError):
            closed = None
        if closed is not None:
            await self._close(closed)
        self._release()
        return closed is not None

    async def _next_closed(self) -> Closed | None:
        while True:
            signal = await self._signals.get()
            if isinstance(signal, Closed):
                return signal
            if isinstance(signal, TokenizerLost | ClientTooSlow):
                return None

    async def _close(self, closed: Closed) -> None:
        self._is_closed = True
        others_tokens = self._others.completion_tokens if self._others is not None else 0
        self._receipt.completion_tokens = closed.completion_tokens + others_tokens
        try:
            if self.keep is not None and closed.kept_body is not None:
                await self.keep(closed.kept_body)
        finally:
            self._release()

    def _check_tokens(self, shown_tokens: int) -> None:
        """What was generated is what the usage tells; behind a stop string it is left out."""
        not_shown = self.transcript.completion_tokens - shown_tokens
        if not_shown < 0 or (not_shown and not self._is_stopped):
            self._receipt.tokens_not_shown = not_shown

    def _release(self) -> None:
        held, self._held = self._held, []
        for events, event_count in held:
            self._put(events, event_count)

    def end_others(self, others: OtherAnswers) -> None:
        """Once, where the prompt has other choices: the last events wait for it."""
        self._signals.put_nowait(others)

    def abort(self) -> None:
        """Stop what still runs for this request. Idempotent."""
        self._cancel_placed()
        if self._events is not None:
            self._events.drop()
            self._events = None

    # The placement's sink.

    def on_started(self, hit_tokens: int) -> None:
        if self._receipt.decode.hit_tokens is None:
            self._receipt.decode.hit_tokens = hit_tokens
            if self._plan.hit_tokens is None:
                self._receipt.hit_tokens = min(hit_tokens, self._plan.prompt.prompt_tokens)
            if self._placements == 1 and self._promised_tokens() - hit_tokens >= self._plan.model.block_tokens:
                self._receipt.note(Fallback.HIT_LOST)

    def on_tokens(self, batch: TokenBatch) -> None:
        if self.on_first_token is not None:
            self.on_first_token()
            self.on_first_token = None
        self.transcript.add(batch)
        if self._events is not None:
            self._events.send(batch)

    def on_finished(self, reason: EndReason, failure: ShoalError | None) -> None:
        self._placed = None
        self._signals.put_nowait(Finished(reason, failure))

    def on_lost(self, error: ShoalError) -> None:
        self._placed = None
        self._signals.put_nowait(WorkerLost(error))

    def _expected_hit_tokens(self) -> int:
        """What the first event tells, before decode has said it; the last one tells what was."""
        told = self._receipt.hit_tokens
        return self._promised_tokens() if told is None else told

    def _promised_tokens(self) -> int:
        plan = self._plan
        block_tokens = plan.model.block_tokens
        return min(plan.promised_blocks * block_tokens, loadable_tokens(plan.prompt.prompt_tokens, block_tokens))

    # The events' sink.

    def on_events(self, events: bytes, parsed_tokens: int | None, event_count: int) -> None:
        self.transcript.show(parsed_tokens, event_count)
        if self.keep is not None and self._ending is not None:
            self._held.append((events, event_count))
        else:
            self._put(events, event_count)

    def _put(self, events: bytes, event_count: int) -> None:
        if not self._peers.client.put(events, event_count) and not self._is_too_slow:
            self._is_too_slow = True
            self._signals.put_nowait(ClientTooSlow())

    def on_stopped(self) -> None:
        self._signals.put_nowait(Stopped())

    def on_closed(self, completion_tokens: int, kept_body: bytes | None) -> None:
        self._events = None
        self._signals.put_nowait(Closed(completion_tokens, kept_body))

    def on_failed(self, error: ShoalError) -> None:
        if self._events is not None:
            self._lost_tokenizers |= {self._events.instance}
            self._events = None
        self._signals.put_nowait(TokenizerLost(error))

    async def _next_signal(self) -> Signal:
        left_s = self._plan.deadline_s - self._peers.clock.monotonic()
        wait_s = left_s if self._ending is None else min(CLOSE_S, left_s)
        try:
            async with asyncio.timeout(wait_s):
                return await self._signals.get()
        except TimeoutError:
            if self._ending is None or left_s <= CLOSE_S:
                raise Interrupted(pb.DEADLINE_EXCEEDED, "the time for this request is used up") from None
            return TokenizerLost(Unavailable(pb.PEER_SILENT, "a part of the system did not answer in time; try again"))

    async def _handle(self, signal: Signal) -> None:
        match signal:
            case Finished(EndReason.FAILURE, failure) if failure is not None:
                await self._resume(failure)
            case Finished(EndReason.CANCEL):  # not by us: a placement that we cancelled tells nothing any more
                await self._resume(Unavailable(pb.UNAVAILABLE, "a decode worker stopped the request; try again"))
            case Finished(reason):
                self._finish(reason)
            case WorkerLost(error):
                await self._resume(error)
            case Stopped():
                self._is_stopped = True
                self._cancel_placed()
                self._finish(EndReason.STOP)
            case TokenizerLost(error):
                await self._reopen(error)
            case OtherAnswers() as others:
                self._others = others
                self._tell_finish()
            case ClientTooSlow():
                raise _reads_too_slowly()

    async def _place(self) -> None:
        plan = self._plan
        self._placements += 1
        placement = Placement(
            request_id=plan.request_id,
            pool=plan.model.pool,
            cache_salt=plan.cache_salt,
            prompt=plan.prompt,
            resumed_token_ids=self.transcript.token_ids,
            is_local_prefill=plan.is_local_prefill,
            budget_s=max(0.001, plan.deadline_s - self._peers.clock.monotonic()),
        )
        placed = await self._peers.place.run(placement, self, self._receipt)
        self._receipt.decode.instance_id = placed.instance_id
        self._placed = placed

    async def _resume(self, error: ShoalError) -> None:
        """Go on at another worker, within the attempts; the client sees a pause."""
        if self._reason is not None:
            return  # a stop string ended the answer already
        if not ERRORS[error.code].is_retried or self._placements >= self._limits.place_attempts:
            raise error
        if self.transcript.completion_tokens >= self._most_tokens():
            self._finish(EndReason.LENGTH)  # only the end of the stream was lost
            return
        if self._plan.prompt.is_constrained and self.transcript.completion_tokens:
            raise error  # an engine begins its grammar at the first token: elsewhere nobody knows how far it was
        self._receipt.note(Fallback.DECODE_RESUMED)
        await self._place()

    def _most_tokens(self) -> int:
        """Where an answer ends by its length: what was asked for, or the end of the model's context."""
        plan = self._plan
        room_tokens = plan.model.max_context_tokens - plan.prompt.prompt_tokens
        return room_tokens if plan.prompt.max_tokens is None else min(plan.prompt.max_tokens, room_tokens)

    def _open(self) -> None:
        """A stream of events that goes on where the client is. Tokens that came before are sent now."""
        plan, transcript = self._plan, self.transcript
        opening = Opening(
            model=plan.prompt.model,
            output_state=plan.prompt.output_state,
            prompt_tokens=plan.prompt.prompt_tokens,
            hit_tokens=self._expected_hit_tokens(),
            prior_token_ids=transcript.prior_token_ids(),
            is_resumed=transcript.has_events,
            prior_events=transcript.shown_events,
        )
        rest = transcript.rest()
        self._events = self._peers.tokenizers.open(opening, self, avoid=self._lost_tokenizers)
        self._openings += 1
        if rest.token_ids:
            self._events.send(rest)
        if self._ending is not None:
            self._events.finish(self._ending)

    async def _reopen(self, error: ShoalError) -> None:
        """Go on at another tokenizer, or at the same one after its restart; the client sees a pause."""
        if self._events is not None:
            self._events.drop()
            self._lost_tokenizers |= {self._events.instance}
            self._events = None
        if not ERRORS[error.code].is_retried or self._openings >= self._limits.event_attempts:
            raise error
        self._receipt.note(Fallback.TOKENIZER_RESUMED)
        clock = self._peers.clock
        until_s = min(clock.monotonic() + self._limits.event_wait_s, self._plan.deadline_s)
        while True:
            try:
                return self._open()
            except Unavailable:
                if clock.monotonic() >= until_s:
                    raise
            await clock.sleep(REOPEN_EACH_S)

    def _finish(self, reason: EndReason) -> None:
        if self._reason is not None:
            return  # end and stop string crossed
        self._reason = reason
        self._tell_finish()

    def _tell_finish(self) -> None:
        """Once generating has ended, here and of the other answers."""
        if self._reason is None or self._others is None:
            return
        self._receipt.stage = "tokenizer"
        self._receipt.completion_tokens = self.transcript.completion_tokens + self._others.completion_tokens
        self._ending = Ending(
            self._reason,
            receipt_json=self._describe(),
            hit_tokens=self._receipt.hit_tokens,
            other_choices=self._others.kept,
        )
        if self._events is not None:
            self._events.finish(self._ending)

    def _cancel_placed(self) -> None:
        if self._placed is not None:
            self._placed.cancel()
            self._placed = None


def _reads_too_slowly() -> Interrupted:
    return Interrupted(pb.CANCELLED, "the client reads too slowly")
