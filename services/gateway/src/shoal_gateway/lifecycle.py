"""One request, from admission to settlement; this file reads as the river of docs/architecture.md.

A Lifecycle owns its request: whatever it started at a peer it ends, once, on every way out. It runs as one task;
leaving clients, the request's deadline and a closing gateway all reach it as a cancellation of what it awaits. It
raises what the client must be told; who called it writes that. docs/decisions/0016-deadlines-and-typed-failures.md
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from shoal_contracts.errors import BadRequest, Bug, Interrupted, Refused, ShoalError
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.admission import AdmissionGate
from shoal_gateway.background import BackgroundClient, BackgroundRuns
from shoal_gateway.keeping import ResponseKeeper
from shoal_gateway.ports import Client, EndReason, Fallback, ResponseStore, TokenizerFleet
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import Blocks, Options, Prompt, RequestPlan, ServedModel, Storage
from shoal_gateway.steps.choices import OtherChoices
from shoal_gateway.steps.encode import EncodeStep
from shoal_gateway.steps.match import MatchStep
from shoal_gateway.steps.place import PlaceStep
from shoal_gateway.steps.prefill import PrefillStep
from shoal_gateway.steps.settle import SettleStep
from shoal_gateway.steps.stream import AnswerStream, StreamLimits, StreamPeers
from shoal_runtime.clock import Clock
from shoal_runtime.tracing import start_span

BUDGET_GRACE_S = 2.0  # the stream tells its own deadline as an event; this is for everything before it


@dataclass(frozen=True, slots=True)
class River:
    """The steps and what they share, the same for all requests."""

    admission: AdmissionGate
    encode: EncodeStep
    match: MatchStep
    prefill: PrefillStep
    place: PlaceStep
    settle: SettleStep
    tokenizers: TokenizerFleet
    clock: Clock
    stream_limits: StreamLimits
    budget_s: float
    responses: ResponseStore
    background: BackgroundRuns


class Lifecycle:
    """Call ``run`` once. A background request leaves it early: its rest runs as a task of the process."""

    def __init__(self, river: River, client: Client, options: Options) -> None:
        self._river = river
        self._client = client
        self._options = options
        self._cache_salt = ""  # one tenant
        self._began_s = river.clock.monotonic()
        self._deadline_s = self._began_s + river.budget_s
        self._answer: AnswerStream | None = None
        self._keeper: ResponseKeeper | None = None
        self._slot: contextlib.AsyncExitStack | None = None  # of the admission, once the rest has it
        self.receipt = Receipt(options.request_id)

    async def run(self) -> None:
        """The whole request, or what its client waits for. Raises ShoalError for what the client must be told."""
        client, error = self._client, None
        try:
            await client.read_body()
            await client.while_present(self._admitted())
        except BaseException as raised:
            error = raised
            raise
        finally:
            client.release_body()
            if self._slot is None:
                self._settle(error)

    async def _admitted(self) -> None:
        """Only a request that has arrived takes a place: who sends slowly must not keep others out."""
        async with contextlib.AsyncExitStack() as slot:
            await slot.enter_async_context(self._river.admission.admit())
            await self._within_budget(self._flow(slot))

    async def _within_budget(self, work: Coroutine[Any, Any, None]) -> None:
        deadline = asyncio.timeout(self._left_s() + BUDGET_GRACE_S)
        try:
            async with deadline:
                await work
        except TimeoutError:
            if not deadline.expired():
                raise
            raise Interrupted(pb.DEADLINE_EXCEEDED, "the time for this request is used up") from None

    async def _flow(self, slot: contextlib.AsyncExitStack) -> None:
        model, prompt = await self._encode()
        if prompt.storage is not None:
            self._keeper = self._new_keeper(prompt.storage)
        if prompt.storage is not None and prompt.storage.is_background:
            await self._hand_over(model, prompt, prompt.storage, slot)
        else:
            await self._generate(model, prompt)

    def _new_keeper(self, storage: Storage) -> ResponseKeeper | None:
        """None: what nobody waits for elsewhere is answered without being kept."""
        responses = self._river.responses
        if responses.is_away and not storage.is_background:
            self.receipt.note(Fallback.RESPONSE_NOT_STORED)
            return None
        return ResponseKeeper(responses, self._options.tenant, storage, self.receipt)

    async def _generate(self, model: ServedModel, prompt: Prompt) -> None:
        blocks = await self._match(model, prompt)
        plan = await self._prefill(self._plan(model, prompt), blocks)
        await self._stream(plan, blocks)

    def _plan(self, model: ServedModel, prompt: Prompt) -> RequestPlan:
        return RequestPlan(self._options.request_id, model, prompt, self._cache_salt, self._deadline_s)

    async def _hand_over(
        self, model: ServedModel, prompt: Prompt, storage: Storage, slot: contextlib.AsyncExitStack
    ) -> None:
        """The rest of a background request runs by itself; its client gets the response as it is, or its events."""
        assert self._keeper is not None
        await self._keeper.begin(self._left_s())
        client, background = self._client, BackgroundClient(self._client if prompt.is_streaming else None)
        key = (self._options.tenant, storage.response_id)
        try:
            self._river.background.start(key, background, lambda: self._run_rest(model, prompt, background))
        except Refused:
            await self._keeper.insist_briefly()
            raise
        self._client, self._slot = background, slot.pop_all()
        if prompt.is_streaming:
            await background.told()
        else:
            client.put(storage.pending_body)
        await client.end(None)

    async def _run_rest(self, model: ServedModel, prompt: Prompt, client: BackgroundClient) -> None:
        """A task of the process. What becomes of the response is told by what is kept of it."""
        assert self._keeper is not None
        error: BaseException | None = None
        try:
            error = await self._generate_unattended(model, prompt, client)
            await self._keeper.insist(self._river.clock)
        except BaseException as raised:  # the gateway closes, or a bug: there may be no time for more
            error = raised
            client.close(
                Refused(pb.DRAINING, "this gateway is leaving; ask for the response by its id")
                if isinstance(raised, asyncio.CancelledError)
                else Bug(pb.BUG, "an internal error; it was logged")
            )
            await self._keeper.insist_briefly()
            raise
        finally:
            self._settle(error)

    async def _generate_unattended(
        self, model: ServedModel, prompt: Prompt, client: BackgroundClient
    ) -> ShoalError | None:
        """Why it failed; the response then says so, wherever it was on its way."""
        assert self._slot is not None
        try:
            async with self._slot:
                await client.while_present(self._within_budget(self._generate(model, prompt)))
        except ShoalError as error:
            self.receipt.outcome = _outcome_of(error)
            answer = self._answer or self._new_answer(self._plan(model, prompt))
            if error.code == pb.CANCELLED:
                is_told = await answer.tell_end(EndReason.CANCEL)
            else:
                is_told = await answer.tell_end(EndReason.FAILURE, error)
            answer.abort()
            client.close(None if is_told else error)
            return error
        return None

    async def _encode(self) -> tuple[ServedModel, Prompt]:
        """1  body → token ids; the body is not kept. Only now it is known whether the client wants events."""
        self.receipt.stage = "tokenizer"
        with start_span("tokenizer.Encode"):
            model, prompt = await self._river.encode.run(self._client.body, self._options, self.receipt)
        self._client.release_body()
        if prompt.is_streaming:
            self._client.begin_events()
        return model, prompt

    async def _match(self, model: ServedModel, prompt: Prompt) -> Blocks:
        """3  block hashes → length of the prefix that is stored."""
        self.receipt.stage = "kvindex"
        with start_span("kvindex.Match"):
            return await self._river.match.run(model, prompt, self._cache_salt, self.receipt, self._deadline_s)

    async def _prefill(self, plan: RequestPlan, blocks: Blocks) -> RequestPlan:
        """4  the rest is computed and stored by a prefill worker."""
        self.receipt.stage = "prefill"
        is_stored = False
        try:
            with start_span("prefill"):
                plan = await self._river.prefill.run(plan, blocks, self.receipt)
            is_stored = plan.promised_blocks >= blocks.whole_blocks
            return plan
        finally:
            if blocks.is_claimed and not is_stored:
                self._river.match.release(plan.model, plan.prompt, blocks, plan.cache_salt, plan.request_id)

    async def _stream(self, plan: RequestPlan, blocks: Blocks) -> None:
        """5 and 6  a decode worker generates, the tokenizer writes, the client reads."""
        river = self._river
        answer = self._answer = self._new_answer(plan)
        others = OtherChoices(plan, self.receipt, self._new_other)
        is_finished = False
        try:
            self.receipt.stage = "decode"
            with start_span("decode.Serve"):
                await others.run_with(answer)
            self.receipt.stage = "client"
            is_finished = True
            await self._client.end(None if plan.prompt.is_streaming else self._describe())
        except ShoalError as error:
            self.receipt.outcome = _outcome_of(error)
            if self._client.has_head and await answer.tell_end(EndReason.FAILURE, error):
                await self._client.end(None)
            raise
        finally:
            answer.abort()
            for own, told in ((plan, answer), *zip(others.plans, others.answers, strict=True)):
                river.settle.claim(own, blocks, told.transcript.token_ids, is_finished=is_finished)

    def _new_answer(self, plan: RequestPlan) -> AnswerStream:
        in_events = self._describe if plan.prompt.is_streaming else lambda: None
        answer = AnswerStream(plan, self._stream_peers(), self._river.stream_limits, self.receipt, in_events)
        answer.on_first_token = self._on_first_token
        answer.keep = self._keeper.keep if self._keeper is not None else None
        return answer

    def _new_other(self, plan: RequestPlan, receipt: Receipt) -> AnswerStream:
        answer = AnswerStream(plan, self._stream_peers(), self._river.stream_limits, receipt, lambda: None)
        answer.on_first_token = self._on_first_token
        return answer

    def _stream_peers(self) -> StreamPeers:
        river = self._river
        return StreamPeers(river.place, river.tokenizers, self._client, river.clock)

    def _settle(self, error: BaseException | None) -> None:
        """7  log, metrics; the blocks were claimed when the stream ended."""
        self.receipt.outcome = "finished" if error is None else _outcome_of(error)
        if isinstance(error, ShoalError):
            self.receipt.error = pb.ErrorCode.Name(error.code)
        self.receipt.total_ms = self._elapsed_ms()
        self._river.settle.record(self.receipt)

    def _describe(self) -> bytes | None:
        """The receipt as far as it is known at the end of the stream; None when the client did not ask."""
        if not self._options.wants_receipt:
            return None
        self.receipt.outcome = self.receipt.outcome or "finished"
        self.receipt.total_ms = self._elapsed_ms()
        return self.receipt.to_json()

    def _on_first_token(self) -> None:
        """Of one of the answers."""
        if self.receipt.ttft_ms is None:
            self.receipt.ttft_ms = self._elapsed_ms()

    def _elapsed_ms(self) -> int:
        return round((self._river.clock.monotonic() - self._began_s) * 1000)

    def _left_s(self) -> float:
        return max(0.001, self._deadline_s - self._river.clock.monotonic())


def _outcome_of(error: BaseException) -> str:
    if isinstance(error, BadRequest):
        return "bad_request"
    if isinstance(error, Refused):
        return "refused"
    if isinstance(error, Interrupted):
        return "cancelled" if error.code == pb.CANCELLED else "expired"
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
