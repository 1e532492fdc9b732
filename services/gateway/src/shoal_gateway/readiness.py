"""Readiness: a real request through every stage, its result kept for some seconds, one at a time.

The prompt has at least two whole blocks. The first is the same every time, so that from the second probe on a store
hit is exercised; a nonce stands after it, so that at least one whole block has to be computed, stored, and loaded by
decode. A fallback on the way is a failure here: users are served all the same, but not by the path that they were
promised. The report names the first stage, in the order of the river, that did not do its part.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from shoal_contracts.errors import ShoalError
from shoal_gateway.lifecycle import Lifecycle, River
from shoal_gateway.ports import DecodeFleet, Fallback
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import Options, ServedModel, loadable_tokens
from shoal_policy import TrafficClass
from shoal_runtime.clock import Clock

FAILED_KEEP_S = 5.0  # a failure is looked at again sooner: a system that starts, or heals, is not ready at first
WORD = " river"  # one token at least, in any vocabulary

_STAGES = {
    Fallback.INDEX_UNKNOWN: ("kvindex", "the index does not answer"),
    Fallback.NATS_AWAY: ("nats", "the message bus is away"),
    Fallback.NO_PREFILL_WORKER: ("prefill", "no prefill worker is ready"),
    Fallback.PREFILL_QUEUE_FULL: ("prefill", "the prefill queue is full"),
    Fallback.PREFILL_FAILED: ("prefill", "no prefill worker answered in time"),
    Fallback.PREFILL_REPEATED: ("prefill", "the first attempt at prefill failed"),
    Fallback.STORE_UNKNOWN: ("store", "the blocks of the prompt were not seen in the store in time"),
    Fallback.HIT_LOST: ("store", "decode did not find what is said to be stored"),
    Fallback.DECODE_RESUMED: ("decode", "a decode worker was lost"),
    Fallback.TOKENIZER_RESUMED: ("tokenizer", "a tokenizer was lost"),
}


@dataclass(frozen=True, slots=True)
class ReadinessReport:
    """``stage`` is the first that failed."""

    is_ready: bool
    stage: str | None = None
    reason: str | None = None
    total_ms: int | None = None
    hit_tokens: int | None = None
    age_s: float = 0.0

    def fields(self) -> dict[str, Any]:
        values = {
            "is_ready": self.is_ready,
            "stage": self.stage,
            "reason": self.reason,
            "total_ms": self.total_ms,
            "hit_tokens": self.hit_tokens,
            "age_s": round(self.age_s, 1),
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """How long a result is kept and how long a probe may take."""

    keep_s: float
    probe_s: float


class ReadinessProbe:
    """Used on one event loop by any number of callers, who share one running probe."""

    def __init__(
        self, river: River, decode: DecodeFleet, limits: ProbeLimits, clock: Clock, new_id: Callable[[], str]
    ) -> None:
        self._river = replace(river, budget_s=limits.probe_s)
        self._decode = decode
        self._limits = limits
        self._clock = clock
        self._new_id = new_id
        self._one_at_a_time = asyncio.Lock()
        self._report: ReadinessReport | None = None
        self._reported_s = 0.0

    async def check(self) -> ReadinessReport:
        """The last result while it is fresh, else that of a new probe."""
        async with self._one_at_a_time:
            age_s = self._clock.monotonic() - self._reported_s
            if self._report is None or age_s > self._kept_s(self._report):
                self._report = await self._probe()
                self._reported_s, age_s = self._clock.monotonic(), 0.0
            return replace(self._report, age_s=age_s)

    def _kept_s(self, report: ReadinessReport) -> float:
        if report.is_ready:
            return self._limits.keep_s if self._decode.models() else 0.0  # what was good is plainly over
        return min(self._limits.keep_s, FAILED_KEEP_S)

    async def _probe(self) -> ReadinessReport:
        models = self._decode.models()
        if not models:
            return ReadinessReport(False, "decode", "no decode worker is ready")
        request_id = self._new_id()
        options = Options(request_id, traffic_class=TrafficClass.PROBE)
        lifecycle = Lifecycle(self._river, _ProbeClient(_body(models[0], request_id)), options)
        with contextlib.suppress(ShoalError):
            await lifecycle.run()
            return judge(lifecycle.receipt, models[0].block_tokens)
        receipt = lifecycle.receipt
        return ReadinessReport(False, receipt.stage, f"the probe failed: {receipt.error}", receipt.total_ms)


def judge(receipt: Receipt, block_tokens: int) -> ReadinessReport:
    """Whether a request that was answered went the whole way."""
    for fallback in _STAGES:
        if fallback in receipt.fallbacks:
            stage, reason = _STAGES[fallback]
            return ReadinessReport(False, stage, reason, receipt.total_ms, receipt.hit_tokens)
    if receipt.prefill is None or receipt.prefill.stored != "yes":
        return ReadinessReport(False, "prefill", "nothing was computed and stored", receipt.total_ms)
    # All of them, because the first ones may be in the engine's own cache; the nonce's block only comes from the store.
    if (receipt.decode.hit_tokens or 0) < loadable_tokens(receipt.prompt_tokens or 1, block_tokens):
        reason = "decode did not load what prefill had stored"
        return ReadinessReport(False, "store", reason, receipt.total_ms, receipt.hit_tokens)
    return ReadinessReport(True, total_ms=receipt.total_ms, hit_tokens=receipt.hit_tokens)


def _body(model: ServedModel, nonce: str) -> bytes:
    """Words enough for a block, the nonce, and words enough for the rest of its block."""
    words = WORD * model.block_tokens
    content = f"{words} {nonce}{words}"
    message = {"role": "user", "content": content}
    body = {"model": model.name, "messages": [message], "max_tokens": 1, "temperature": 0}
    return json.dumps(body).encode()


class _ProbeClient:
    """A client that is always there and reads nothing; see ``ports.Client``."""

    has_head = False

    def __init__(self, body: bytes) -> None:
        self._body = body

    @property
    def body(self) -> bytes:
        return self._body

    async def read_body(self) -> None:
        return

    def release_body(self) -> None:
        self._body = b""

    async def while_present(self, work: Coroutine[Any, Any, None]) -> None:
        await work

    def begin_events(self) -> None:
        return

    def put(self, events: bytes, event_count: int = 0) -> bool:
        return True

    async def end(self, receipt_json: bytes | None) -> None:
        return
