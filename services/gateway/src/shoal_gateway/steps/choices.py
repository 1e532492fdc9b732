"""Several answers to one prompt (``n``): generated at the same time, each as a request of its own to decode.

The prompt is encoded, looked up and prefilled once. The first answer's stream ends last: it is told what the tokenizer
kept of the others, and sums up. An answer that fails ends them all, as the client gets one end.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shoal_contracts.errors import BadRequest, Bug
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import RequestPlan
from shoal_gateway.steps.signals import OtherAnswers
from shoal_gateway.steps.stream import AnswerStream

MAX_KEPT_BYTES = 12 * 1024 * 1024  # of all bodies together; a gRPC message takes 16 MiB

NewAnswer = Callable[[RequestPlan, Receipt], AnswerStream]


class OtherChoices:
    """All answers but the first; none of them for most requests. Owned by the Lifecycle of the request."""

    def __init__(self, plan: RequestPlan, receipt: Receipt, new_answer: NewAnswer) -> None:
        self._receipt = receipt
        self._receipts = [
            Receipt(f"{plan.request_id}-{number}") for number, _ in enumerate(plan.prompt.other_choices, 1)
        ]
        self.plans = [
            replace(
                plan,
                request_id=own.request_id,
                prompt=replace(
                    plan.prompt, sampling=choice.sampling, output_state=choice.output_state, other_choices=()
                ),
            )
            for own, choice in zip(self._receipts, plan.prompt.other_choices, strict=True)
        ]
        self.answers = [new_answer(*own) for own in zip(self.plans, self._receipts, strict=True)]
        self._kept: list[bytes] = [b""] * len(self.answers)
        self._running = len(self.answers)

    async def run_with(self, first: AnswerStream) -> None:
        """Return when the first answer, and with it every other, is written. Raises what ended one of them."""
        if not self.answers:
            await first.run()
            return
        work = [first.run(), *(self._run(number, answer, first) for number, answer in enumerate(self.answers))]
        # Not a TaskGroup: in Python 3.11 that leaves its task marked as cancelled, and time-outs around miss their own.
        tasks = [asyncio.create_task(each, name="answer") for each in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for answer, own in zip(self.answers, self._receipts, strict=True):
                answer.abort()
                self._receipt.fallbacks.extend(own.fallbacks)
                self._receipt.tokens_not_shown += own.tokens_not_shown

    async def _run(self, number: int, answer: AnswerStream, first: AnswerStream) -> None:
        answer.keep = partial(self._keep, number)
        await answer.run()
        self._running -= 1
        if not self._running:
            first.end_others(self._sum())

    async def _keep(self, number: int, body: bytes) -> None:
        self._kept[number] = body

    def _sum(self) -> OtherAnswers:
        if not all(self._kept):
            raise Bug(pb.BUG, "the tokenizer kept nothing of one of several answers")
        if sum(map(len, self._kept)) > MAX_KEPT_BYTES:
            raise BadRequest(
                pb.INVALID_REQUEST, "The answers are too long for one body. Ask for a stream instead.", param="n"
            )
        return OtherAnswers(tuple(self._kept), sum(own.completion_tokens or 0 for own in self._receipts))
