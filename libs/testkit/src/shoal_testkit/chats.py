"""Chats with a gateway in tests: the peers around it, a client that reads events, and what it saw.

The gateway itself is started by the test: no test package may be imported from a service's layer upwards. Start it
before the peers, so that it hears their first beats.
"""

import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from shoal_testkit.fake_workers import FakeDecode, FakePrefill
from shoal_testkit.fakes import BLOCK_TOKENS, FakeKvIndex, FakeTokenizer, peer_running

PROMPT = "x" * (4 * BLOCK_TOKENS + 3)
TIMEOUT_S = 20.0

_numbers = itertools.count(1)


@dataclass(slots=True)
class ChatPeers:
    """One of each."""

    model: str
    tokenizer: FakeTokenizer
    index: FakeKvIndex
    prefill: FakePrefill
    decode: FakeDecode


def chat_peers() -> ChatPeers:
    """Not running yet; under a model and a pool of their own, so that tests on one NATS do not meet."""
    pool, model = f"pool{next(_numbers)}", f"model{next(_numbers)}"
    return ChatPeers(
        model,
        FakeTokenizer(pool, model),
        FakeKvIndex(pool, model),
        FakePrefill(pool, model),
        FakeDecode(pool, model),
    )


@contextlib.asynccontextmanager
async def peers_running(peers: ChatPeers, nats_url: str) -> AsyncIterator[None]:
    """All four; decode comes last, so who sees it has seen the others."""
    async with contextlib.AsyncExitStack() as stack:
        for peer in (peers.tokenizer, peers.index, peers.prefill, peers.decode):
            await stack.enter_async_context(peer_running(peer, nats_url))
        yield


@dataclass(slots=True)
class Told:
    """One response as the client saw it."""

    status: int = 0
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    body: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    comments: int = 0
    has_done: bool = False

    @property
    def tokens(self) -> list[int]:
        """Of the body, or of the events in their order."""
        if self.body:
            return list(self.body["tokens"])
        return [event["token"] for event in self.events if "token" in event]

    @property
    def end(self) -> dict[str, Any]:
        """What the last event or the body says about the whole answer."""
        return self.body or next(event for event in reversed(self.events) if "finish" in event)


class ChatClient:
    """Talks to one gateway. ``told`` is filled while a response is read, so a test can look before its end."""

    def __init__(self, base_url: str, model: str) -> None:
        self.model = model
        self.http = httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S, trust_env=False)

    def body(self, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "messages": [{"role": "user", "content": prompt}], **fields}

    async def ask(
        self, told: Told | None = None, *, prompt: str = PROMPT, receipt: bool = False, **fields: Any
    ) -> Told:
        """POST one chat and read the whole response, streaming or not."""
        told = told or Told()
        headers = {"x-shoal-receipt": "1"} if receipt else {}
        body = self.body(prompt, **fields)
        async with self.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            told.status, told.headers = response.status_code, response.headers
            if not response.headers["content-type"].startswith("text/event-stream"):
                told.body = json.loads(await response.aread())
                return told
            async for line in response.aiter_lines():
                _read_line(line, told)
        return told

    async def until_known(self) -> None:
        """The gateway has heard of the model's decode worker."""
        async with httpx.AsyncClient(base_url=self.http.base_url, trust_env=False) as http:
            known = False
            while not known:
                models = (await http.get("/v1/models")).json()["data"]
                known = any(model["id"] == self.model for model in models)


def _read_line(line: str, told: Told) -> None:
    if line.startswith(":"):
        told.comments += 1
    elif line == "data: [DONE]":
        told.has_done = True
    elif line.startswith("data: "):
        told.events.append(json.loads(line.removeprefix("data: ")))


@contextlib.asynccontextmanager
async def chat_client(base_url: str, model: str) -> AsyncIterator[ChatClient]:
    client = ChatClient(base_url, model)
    try:
        yield client
    finally:
        await client.http.aclose()
