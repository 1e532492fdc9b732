"""One request, from admission to settlement; this file reads as the river of docs/architecture.md.

A Lifecycle owns its request: whatever it started at a peer it ends, once, on every way out. It runs as one task;
leaving clients, the request's deadline and a closing gateway all reach it as a cancellation of what it awaits. It
raises what the client must be told; who called it writes that. docs/decisions/0016-deadlines-and-typed-failures.md
"""

import asyncio
from dataclasses import dataclass

from shoal_contracts.errors import BadRequest, Interrupted, Refused, ShoalError
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.admission import AdmissionGate
from shoal_gateway.ports import Client, TokenizerFleet
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import Blocks, Options, Prompt, RequestPlan, ServedModel
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


class Lifecycle:
    """Call ``run`` once."""

    def __init__(self, river: River, client: Client, options: Options) -> None:
        self._river = river
        self._client = client
        self._options = options
        self._cache_salt = ""  # one tenant
        self._began_s = river.clock.monotonic()
        self._deadline_s = self._began_s + river.budget_s
        self.receipt = Receipt(options.request_id)

    async def run(self) -> None:
        """The whole request. Raises ShoalError for what the client must be told."""
        try:
            await self._client.read_body()
            await self._client.while_present(self._admitted())
            self.receipt.outcome = "finished"
        except ShoalError as error:
            self.receipt.outcome = _outcome_of(error)
            self.receipt.error = pb.ErrorCode.Name(error.code)
            raise
        except asyncio.CancelledError:
            self.receipt.outcome = "cancelled"
            raise
        finally:
            self._client.release_body()
            self._settle()

    async def _admitted(self) -> None:
        """Only a request that has arrived takes a place: who sends slowly must not keep others out."""
        async with self._river.admission.admit():
            await self._within_budget()

    async def _within_budget(self) -> None:
        deadline = asyncio.timeout(self._river.budget_s + BUDGET_GRACE_S)
        try:
            async with deadline:
                await self._flow()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise Interrupted(pb.DEADLINE_EXCEEDED, "the time for this request is used up") from None

    async def _flow(self) -> None:
        model, prompt = await self._encode()
        blocks = await self._match(model, prompt)
        plan = RequestPlan(self._options.request_id, model, prompt, self._cache_salt, self._deadline_s)
        plan = await self._prefill(plan, blocks)
        await self._stream(plan, blocks)

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
                self._river.match.release(plan.model, plan.prompt, plan.cache_salt, plan.request_id)

    async def _stream(self, plan: RequestPlan, blocks: Blocks) -> None:
        """5 and 6  a decode worker generates, the tokenizer writes, the client reads."""
        river = self._river
        peers = StreamPeers(river.place, river.tokenizers, self._client, river.clock)
        in_events = self._describe if plan.prompt.is_streaming else lambda: None
        answer = AnswerStream(plan, peers, river.stream_limits, self.receipt, in_events)
        answer.on_first_token = self._on_first_token
        is_finished = False
        try:
            self.receipt.stage = "decode"
            with start_span("decode.Serve"):
                await answer.run()
            self.receipt.stage = "client"
            is_finished = True
            await self._client.end(None if plan.prompt.is_streaming else self._describe())
        except ShoalError as error:
            self.receipt.outcome = _outcome_of(error)
            if self._client.has_head and await answer.tell_failure(error):
                await self._client.end(None)
            raise
        finally:
            answer.abort()
            river.settle.claim(plan, blocks, answer.transcript.token_ids, is_finished=is_finished)

    def _settle(self) -> None:
        """7  log, metrics; the blocks were claimed when the stream ended."""
        self.receipt.outcome = self.receipt.outcome or "failed"
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
        self.receipt.ttft_ms = self._elapsed_ms()

    def _elapsed_ms(self) -> int:
        return round((self._river.clock.monotonic() - self._began_s) * 1000)


def _outcome_of(error: ShoalError) -> str:
    if isinstance(error, BadRequest):
        return "bad_request"
    if isinstance(error, Refused):
        return "refused"
    if isinstance(error, Interrupted):
        return "cancelled" if error.code == pb.CANCELLED else "expired"
    return "failed"
