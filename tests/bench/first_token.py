"""Time to the first token: a prompt that nobody knows, and the same prompt again when the store has it.

Before a prompt is asked again comes the next new one. Where the engine's own memory holds little more than one
prompt (``REAL``), the second answer is therefore loaded from the store and not found in the engine.
"""

import asyncio
import json
import re
import uuid
from itertools import pairwise

from gateway_load import PATH
from http_load import Answer, Connection, connections
from rows import Row
from systems import System

PROMPTS = 4
SHIPS = 110  # lines of a prompt; about 2,480 tokens
# A context of one prompt, and memory for it alone: 46 KB of KV a token in float32.
REAL = {
    "SHOAL_ENGINE_DTYPE": "float32",
    "SHOAL_ENGINE_MAX_CONTEXT_TOKENS": "2560",
    "SHOAL_ENGINE_KV_MEMORY_BYTES": str(2_688 * 46_080),
}
STORED_S = 1.0
HIT = re.compile(rb'"cached_tokens": ?(\d+)')
PROMPT = re.compile(rb'"prompt_tokens": ?(\d+)')


def body_of(model: str, name: str) -> bytes:
    lines = [f"{n}. Ship {n} left in the morning and came back with {7 * n} fish." for n in range(1, SHIPS + 1)]
    text = "\n".join([f"Log {name}.", *lines, "What does it say?"])
    asked = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    return json.dumps({**asked, "stream": True, "stream_options": {"include_usage": True}}).encode()


def number(pattern: re.Pattern[bytes], answer: Answer) -> float:
    found = pattern.search(answer.body)
    return float(found[1]) if found else 0.0


async def measure(system: System, engine: str) -> list[Row]:
    """Cold and known in turns."""
    cold: list[Answer] = []
    known: list[Answer] = []
    bodies = [body_of(system.model, uuid.uuid4().hex) for _ in range(PROMPTS + 1)]
    async with connections(system.url, 1) as (connection,):
        await _ask(connection, bodies[0])  # first uses on the way; asked again it is as good as the others
        for before, body in pairwise(bodies):
            cold.append(await _ask(connection, body))
            known.append(await _ask(connection, before))
    return [
        Row("first_token", engine, "cold", "ms", tuple(1e3 * answer.first_text_s for answer in cold), True),
        Row("first_token", engine, "store hit", "ms", tuple(1e3 * answer.first_text_s for answer in known)),
        Row("first_token", engine, "prompt", "tokens", tuple(number(PROMPT, answer) for answer in cold)),
        Row("first_token", engine, "hit when cold", "tokens", tuple(number(HIT, answer) for answer in cold)),
        Row("first_token", engine, "hit", "tokens", tuple(number(HIT, answer) for answer in known)),
    ]


async def _ask(connection: Connection, body: bytes) -> Answer:
    answer = await connection.post(PATH, body)
    await asyncio.sleep(STORED_S)  # what it computed reaches the store and the index
    return answer
