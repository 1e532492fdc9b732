"""Chat Completions as a client sees them: asks over HTTP, reads events as they come, can leave at any moment."""

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from shoal_testkit.waits import until

TIMEOUT_S = 60.0
LEAVING_S = 5.0
WORDS = ("wave", "salt", "tide", "reef", "gull", "sand", "foam", "sail", "mast", "keel", "rope", "wind", "rain")


def a_prompt(words: int) -> str:
    """Text that nobody asked before, about a token a word."""
    return " ".join([uuid.uuid4().hex[:6], *random.choices(WORDS, k=words)])


def assert_whole(answer: "Answer", max_tokens: int) -> None:
    """It ended as it should: each part of it came, and came once."""
    assert (answer.status, answer.error) == (200, None)
    assert answer.finish_reasons == ["length"]
    assert answer.usage["completion_tokens"] == max_tokens
    if answer.events:
        assert (answer.openings, answer.done_marks) == (1, 1)


@dataclass(slots=True)
class Answer:
    """One response, filled while it is read; ``task`` ends when it was read to its end, or raises."""

    status: int = 0
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    body: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)  # of each event, monotonic
    done_marks: int = 0
    task: "asyncio.Task[None] | None" = None

    @property
    def deltas(self) -> list[str]:
        """Pieces of text in their order."""
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]

    @property
    def text(self) -> str:
        """Of the body, or of the events so far."""
        if self.body:
            return str(self.body["choices"][0]["message"]["content"])
        return "".join(self.deltas)

    @property
    def tokens(self) -> list[list[int]]:
        """The bytes of each token, when the request asked for logprobs."""
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        shown = [choice["logprobs"]["content"] for choice in choices if choice.get("logprobs")]
        return [token["bytes"] for content in shown for token in content]

    @property
    def openings(self) -> int:
        """Events that begin an answer; one, whatever happened."""
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return sum("role" in choice["delta"] for choice in choices)

    @property
    def finish_reasons(self) -> list[str]:
        """All that were told; one, whatever happened."""
        source = [self.body] if self.body else self.events
        choices = [choice for event in source for choice in event.get("choices", ())]
        return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]

    @property
    def error(self) -> dict[str, Any] | None:
        """Of the body, or of the last event."""
        found: dict[str, Any] | None = (self.events[-1] if self.events else self.body).get("error")
        return found

    @property
    def usage(self) -> dict[str, Any]:
        found: dict[str, Any] = (self.events[-1] if self.events else self.body)["usage"]
        return found

    @property
    def receipt(self) -> dict[str, Any]:
        """What the gateway says about the request's way."""
        if self.events:
            told: dict[str, Any] = self.events[-1]["shoal_receipt"]
            return told
        parsed: dict[str, Any] = json.loads(self.headers["x-shoal-receipt"])
        return parsed

    async def read(self) -> "Answer":
        """Wait for its end."""
        assert self.task is not None
        await self.task
        return self

    async def has_begun(self, deltas: int = 1, *, timeout_s: float = 20.0) -> None:
        """Wait until that many pieces of text came; fails when the response ended before."""
        assert self.task is not None
        task = self.task
        await until(lambda: len(self.deltas) >= deltas or task.done(), timeout_s)
        assert len(self.deltas) >= deltas, f"ended early: {self.status} {self.error} {self.body}"

    async def leave(self) -> float:
        """Break the connection; returns the wall clock time at which it was broken."""
        assert self.task is not None
        left_at_s = time.time()
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=LEAVING_S)
        return left_at_s


class ChatApi:
    """One gateway. Every request has a connection of its own, so that leaving one breaks nothing else."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model

    def ask(self, prompt: str, max_tokens: int, *, is_stream: bool = True, **fields: Any) -> Answer:
        """Start one chat that runs to its length; the receipt is asked for."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": is_stream,
            **({"stream_options": {"include_usage": True}} if is_stream else {}),
            **fields,
        }
        answer = Answer()
        answer.task = asyncio.create_task(self._read(body, answer), name="client")
        return answer

    def ask_all(self, prompts: Sequence[str], max_tokens: int) -> list[Answer]:
        """Streams at the same time; every other one shows its tokens one by one, the others text alone."""
        return [self.ask(prompt, max_tokens, logprobs=number % 2 == 0) for number, prompt in enumerate(prompts)]

    async def read_all(self, prompts: Sequence[str], max_tokens: int) -> list[Answer]:
        """The same, to their ends."""
        return [await answer.read() for answer in self.ask_all(prompts, max_tokens)]

    async def _read(self, body: dict[str, Any], answer: Answer) -> None:
        headers = {"x-shoal-receipt": "1"}
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S, trust_env=False) as http,
            http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response,
        ):
            answer.status, answer.headers = response.status_code, response.headers
            if not response.headers["content-type"].startswith("text/event-stream"):
                answer.body = json.loads(await response.aread())
                return
            async for line in _lines(response):
                if line == "data: [DONE]":
                    answer.done_marks += 1
                elif line.startswith("data: "):
                    answer.events.append(json.loads(line.removeprefix("data: ")))
                    answer.arrived_s.append(time.monotonic())


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Of an event stream. httpx's own also end at characters, such as U+0085, that a text may hold."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode()
