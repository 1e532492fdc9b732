"""CPU a request and a streamed token, of each service on the way, against the HTTP edge alone.

A round loads the system while the edge idles, then the edge while the system idles, so that each gives the other's
idle CPU (beats, probes), which is taken off. The edge writes as many events of the same size as the gateway did.
The CPU of decode has the scripted engine in it; ``decode_serve`` tells them apart.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from http_load import Answer, ask, connections
from rows import Row
from systems import SERVICES, STEP_MS, System

PATH = "/v1/chat/completions"
QUESTION = "Where does the wind come from?"
SETTLE_S = 0.4
ROUNDS = 3
REQUEST_TOKENS = 1  # what a request costs beside its tokens
REQUESTS = {1: 60, 32: 20}  # how many at a time: how many each, a round
STREAM_TOKENS = {1: 150, 32: 150, 128: 100}  # streams: tokens of each, a round


@dataclass(frozen=True, slots=True)
class Used:
    """CPU seconds of all processes during one half of a round."""

    wall_s: float
    cpu_s: dict[str, float]
    answers: list[Answer]


@dataclass(frozen=True, slots=True)
class Half:
    """One way to load one of the two systems."""

    load: Callable[[], Awaitable[list[Answer]]]
    systems: tuple[System, System]

    async def run(self) -> Used:
        await asyncio.sleep(SETTLE_S)  # what the other half left to do
        before, began_s = self._used_s(), time.perf_counter()
        answers = await self.load()
        wall_s = time.perf_counter() - began_s
        after = self._used_s()
        return Used(wall_s, {name: after[name] - before[name] for name in before}, answers)

    def _used_s(self) -> dict[str, float]:
        return self.systems[0].used_s() | self.systems[1].used_s()


def body_of(model: str, max_tokens: int, *, stream: bool) -> bytes:
    messages = [{"role": "user", "content": QUESTION}]
    return json.dumps({"model": model, "messages": messages, "max_tokens": max_tokens, "stream": stream}).encode()


def over_idle_us(busy: Used, idle: Used, name: str, count: int) -> float:
    """µs of CPU of one process for each of ``count``, without what it uses when nothing is asked."""
    idle_s = idle.cpu_s[name] / idle.wall_s * busy.wall_s
    return 1e6 * (busy.cpu_s[name] - idle_s) / count


async def rounds_of(
    system: System, alone: System, at_a_time: int, each: int, body: bytes
) -> tuple[list[Used], list[Used]]:
    """A B A B: the system, the edge alone, and so on."""
    async with AsyncExitStack() as stack:
        to_system = await stack.enter_async_context(connections(system.url, at_a_time))
        to_alone = await stack.enter_async_context(connections(alone.url, at_a_time))
        path = _same_answer(await ask(to_system, PATH, body))
        await ask(to_alone, path, body)
        both = (system, alone)
        halves = [
            Half(lambda: ask(to_system, PATH, body, each), both),
            Half(lambda: ask(to_alone, path, body, each), both),
        ]
        used: list[list[Used]] = [[], []]
        for _ in range(ROUNDS):
            for number, half in enumerate(halves):
                used[number].append(await half.run())
        return used[0], used[1]


def _same_answer(answers: list[Answer]) -> str:
    """The query that makes the edge alone write what these answers were, on average."""
    events = sum(answer.events for answer in answers)
    size_bytes = sum(len(answer.body) for answer in answers) // (events or len(answers))
    step_ms = STEP_MS if events else STEP_MS * REQUEST_TOKENS
    return f"/?events={round(events / len(answers))}&bytes={size_bytes}&step_ms={step_ms}"


def rows_of(topic: str, case: str, count: int, unit: str, used: tuple[list[Used], list[Used]]) -> list[Row]:
    """The baseline, each service, their sum; and how fast it went."""
    pairs = list(zip(*used, strict=True))
    by_name = {name: [over_idle_us(busy, idle, name, count) for busy, idle in pairs] for name in SERVICES}
    alone = tuple(over_idle_us(busy, idle, "http", count) for idle, busy in pairs)
    rows = [Row(topic, case, "HTTP edge alone", f"µs/{unit}", alone, is_baseline=True)]
    rows += [Row(topic, case, name, f"µs/{unit}", tuple(values)) for name, values in by_name.items()]
    total = tuple(map(sum, zip(*by_name.values(), strict=True)))
    rows.append(Row(topic, case, "+".join(SERVICES), f"µs/{unit}", total))
    rows.append(Row(topic, case, "speed", f"{unit}s/s", tuple(count / busy.wall_s for busy, _ in pairs)))
    return rows


async def requests(system: System, alone: System) -> list[Row]:
    """Short answers in one piece; prompts of less than one block, so no prefill worker takes part."""
    rows = []
    body = body_of(system.model, REQUEST_TOKENS, stream=False)
    for at_a_time, each in REQUESTS.items():
        used = await rounds_of(system, alone, at_a_time, each, body)
        rows += rows_of("gateway_request", f"{at_a_time} at a time", at_a_time * each, "request", used)
    return rows


async def streams(system: System, alone: System) -> list[Row]:
    """Long answers as events."""
    rows = []
    for count, tokens_each in STREAM_TOKENS.items():
        body = body_of(system.model, tokens_each, stream=True)
        used = await rounds_of(system, alone, count, 1, body)
        case = f"{count} stream{'s' if count > 1 else ''}"
        rows += rows_of("streamed_token", case, count * tokens_each, "token", used)
        batches = tuple(count * tokens_each / sum(answer.events for answer in half.answers) for half in used[0])
        rows.append(Row("streamed_token", case, "batching", "tokens/event", batches))
    return rows
