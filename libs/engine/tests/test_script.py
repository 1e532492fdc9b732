import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from shoal_contracts.ids import pack_u32
from shoal_engine.api import EngineFailed, EngineRequest, FinishReason, RequestRefused, Sampling
from shoal_engine.scripted import BlockStore, ScriptedEngine, ScriptedModel, SharedMemory
from shoal_engine.scripted.script import PlayedAnswer, Script
from shoal_runtime.clock import SystemClock
from shoal_testkit.suites.constraint import of_schema, tag

STOP = 9
LINES = [
    {"after": [1, 2], "answer": [10, 11, 12]},
    {"after": [2], "answer": [20]},
    {"after": [3], "answer": [30, 31], "stop": False},
]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    path = tmp_path / "script.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES) + "\n")
    return Script.read(path)


@pytest_asyncio.fixture
async def engine(script: Script) -> AsyncIterator[ScriptedEngine]:
    model = ScriptedModel(max_context_tokens=200, script=script)
    engine = ScriptedEngine(model, clock=SystemClock(), store=BlockStore(SharedMemory()))
    await engine.start()
    yield engine
    await engine.stop()


async def played(engine: ScriptedEngine, request: EngineRequest) -> tuple[list[int], FinishReason | None]:
    token_ids: list[int] = []
    async with asyncio.timeout(5):
        async for step in engine.generate(request):
            token_ids += step.token_ids
    return token_ids, step.finish


def a_request(*prompt: int, max_tokens: int = 6) -> EngineRequest:
    return EngineRequest("r", prompt, Sampling(max_tokens=max_tokens, stop_token_ids=(STOP,)))


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ([1, 2], [10, 11, 12]),
        ([5, 1, 2, 5], [10, 11, 12]),
        ([5, 2], [20]),
        ([1, 2, 5, 2], [20]),
        ([2, 2, 1, 2], [10, 11, 12]),
        ([1], None),
        ([512, 0], None),
        ([256, 2], [20]),
    ],
)
def test_the_line_that_stands_last_counts_and_the_longer_of_two(
    script: Script, prompt: list[int], answer: list[int] | None
) -> None:
    found = script.find(pack_u32(prompt))
    assert (found.token_ids if found else None) == answer


def test_bytes_across_two_tokens_are_no_place() -> None:
    script = Script([(pack_u32([1 << 8]), PlayedAnswer([1], True))])
    assert script.find(pack_u32([1 << 16, 1])) is None


async def test_an_answer_ends_with_a_stop_token_or_goes_on_inventing(engine: ScriptedEngine) -> None:
    assert await played(engine, a_request(1, 2)) == ([10, 11, 12], FinishReason.STOP)
    token_ids, finish = await played(engine, a_request(1, 2, 3))
    assert token_ids[:2] == [30, 31]
    assert (len(token_ids), finish) == (6, FinishReason.LENGTH)


async def test_a_resumed_answer_goes_on_where_it_was(engine: ScriptedEngine) -> None:
    request = replace(a_request(1, 2), resumed_token_ids=[10, 11])
    assert await played(engine, request) == ([12], FinishReason.STOP)


async def test_without_a_tokenizer_a_constraint_is_refused(engine: ScriptedEngine) -> None:
    sampling = replace(a_request(1).sampling, constraint=tag(of_schema(True)))
    with pytest.raises(RequestRefused, match="SHOAL_SCRIPTED_TOKENIZER"):
        await played(engine, replace(a_request(1), sampling=sampling))


@pytest.mark.parametrize("text", ["{", "[]", '{"after": [1]}', '{"after": [], "answer": []}', '{"after": [1], "x": 1}'])
def test_a_broken_script_stops_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "s").write_text(text)
    with pytest.raises(EngineFailed, match="script"):
        Script.read(tmp_path / "s")
    with pytest.raises(EngineFailed, match="cannot be read"):
        Script.read(tmp_path / "absent")
