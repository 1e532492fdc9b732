"""`shoal up` as a person starts it: the packaged model on vLLM, a real store, a conversation, and a store that dies."""

import asyncio
import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import httpx
import pytest
from openai.types import CompletionUsage
from transformers import AutoTokenizer

from shoal_engine import EngineRequest, EngineSettings, Sampling
from shoal_engine.vllm.engine import VllmEngine
from shoal_local.home import Home
from shoal_local.processes import family, is_alive
from shoal_local.settings import LocalSettings
from shoal_model import prepare
from shoal_testkit.suites.engine_lab import read

from .conftest import READY_SIGN, shoal_up, until

MODEL = "SmolLM2-135M-Instruct"
SHIPS = "\n".join(f"{n}. Ship {n} left in the morning and came back with {7 * n} fish." for n in range(1, 111))
END_OF_TURN = "2"
BLOCK = 128
ENGINE_S = 180.0  # until a killed engine is back
READY_S = 420.0
SEGMENTS_BEFORE = set(Path("/dev/shm").glob("lmcache*"))

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    # bfloat16 would be no oracle: there even one engine answers differently on a hit.
    with shoal_up(tmp_path_factory.mktemp("home"), SHOAL_ENGINE_DTYPE="float32") as running:
        running.wait_for(READY_SIGN, timeout_s=READY_S)
        print(running.output[running.output.index("everything is ready") :])
        yield running


@dataclass
class Turn:
    """One streamed answer: what it said, what it cost, when it began."""

    text: str = ""
    usage: CompletionUsage | None = None
    receipt: dict | None = None
    first_token_s: float | None = None

    @property
    def cached_tokens(self):
        return self.usage.prompt_tokens_details.cached_tokens


def take_turn(real, messages, **options):
    started, turn = time.monotonic(), Turn()
    events = real.openai.with_options(timeout=300).chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-shoal-receipt": "1"},
        **{"max_tokens": 150, **options},
    )
    for event in events:
        if event.choices and event.choices[0].delta.content:
            turn.first_token_s = turn.first_token_s or time.monotonic() - started
            turn.text += event.choices[0].delta.content
        turn.usage = event.usage or turn.usage
        turn.receipt = (event.model_extra or {}).get("shoal_receipt") or turn.receipt
    return turn


def test_it_knows_the_capital_of_france(real):
    assert "Paris" in take_turn(real, [{"role": "user", "content": "What is the capital of France?"}]).text


async def words_of_one_engine(questions, max_tokens):
    """What the model says when one engine without a store computes everything."""
    folder = prepare("", LocalSettings.load("local").models_dir, print).folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = VllmEngine(EngineSettings(model=str(folder), dtype="float32", max_context_tokens=1024))
    words = []
    try:
        await engine.start()
        for number, question in enumerate(questions):
            chat = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            token_ids = tokenizer(prompt, add_special_tokens=False).input_ids
            sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
            answer = await read(engine, EngineRequest(f"alone-{number}", token_ids, sampling))
            assert answer.hit_tokens == 0
            words.append(tokenizer.decode(answer.token_ids, skip_special_tokens=True))
    finally:
        await engine.stop()
    return words


def test_its_words_are_those_of_one_engine_without_a_store(real):
    questions = ["What is the capital of France?", "\n".join([*SHIPS.splitlines()[:16], "Tell me what it says."])]
    expected = asyncio.run(words_of_one_engine(questions, 40))
    for question, words in zip(questions, expected, strict=True):
        chat = [{"role": "user", "content": question}]
        cold, again = take_turn(real, chat, max_tokens=40), take_turn(real, chat, max_tokens=40)
        assert (cold.text, again.text) == (words, words)
    assert again.cached_tokens >= BLOCK


def settled_streams(real):
    lines = (real.home / "logs" / "decode.log").read_text().splitlines()
    return [json.loads(line) for line in lines if '"event":"stream.settled"' in line]


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_client_that_leaves_ends_its_request_in_the_engine_once(real, is_streaming):
    before = len(settled_streams(real))
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me a very long story about the sea."}],
        "stream": is_streaming,
        "logit_bias": {END_OF_TURN: -100},
        "max_tokens": 2000,
    }
    with (
        contextlib.suppress(httpx.ReadTimeout),
        real.http as client,
        client.stream("POST", "/v1/chat/completions", json=body, timeout=4.0) as response,
    ):
        next(response.iter_lines())  # of a stream that has begun; the other call has no line in these seconds
    left_at = time.time()
    deadline = time.monotonic() + 30
    while len(settled_streams(real)) == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(1.0)  # a second end would come now
    [ended] = settled_streams(real)[before:]
    ended_at = datetime.fromisoformat(ended["at"]).timestamp()
    print(f"\nthe client left, the engine's request ended after {1000 * (ended_at - left_at):.0f} ms")
    assert ended["outcome"] == "cancelled"
    assert ended["completion_tokens"] < 2000


def test_the_second_turn_of_a_long_conversation_is_found_in_the_store(real):
    question = {"role": "user", "content": f"A log of ships.\n{SHIPS}\nTell me what it says."}
    # Without its end-of-turn token the model goes on for more than a block.
    first = take_turn(real, [question], max_tokens=200, logit_bias={END_OF_TURN: -100})
    turns = [question, {"role": "assistant", "content": first.text}, {"role": "user", "content": "How many ships?"}]
    second = take_turn(real, turns, max_tokens=20)
    print(f"\nfirst turn: {first.usage.prompt_tokens} tokens, first token after {first.first_token_s:.2f} s")
    print(f"second turn: {second.cached_tokens} cached, first token after {second.first_token_s:.2f} s")
    print(f"receipt of the second turn: {second.receipt}")
    assert first.usage.prompt_tokens > 2000
    # The last token of an answer is sampled and never computed on; a text encoded again may differ from what was
    # generated, and then the receipt names the first token that does.
    shared = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    shared = min(shared, second.receipt.get("diverged_at_token", shared))
    assert second.cached_tokens >= shared // BLOCK * BLOCK
    assert second.cached_tokens > first.usage.prompt_tokens // BLOCK * BLOCK


def child_of(real, service):
    return next(child for child in Home(real.home).read().children if child.service == service)


def kill_and_await(real, service):
    before = child_of(real, service)
    os.kill(before.name.pid, signal.SIGKILL)
    until(
        lambda: (child_of(real, service).state, child_of(real, service).restarts) == ("ready", before.restarts + 1),
        timeout_s=ENGINE_S,
    )


def test_a_killed_store_comes_back_and_nobody_is_refused(real):
    before = child_of(real, "lmcache")
    os.kill(before.name.pid, signal.SIGKILL)
    assert "Paris" in take_turn(real, [{"role": "user", "content": "What is the capital of France?"}]).text
    until(
        lambda: (child_of(real, "lmcache").state, child_of(real, "lmcache").restarts) == ("ready", 1),
        timeout_s=ENGINE_S,
    )


def test_whatever_is_killed_the_conversation_is_found_again_with_the_same_words(real):
    chat = [{"role": "user", "content": "\n".join([*SHIPS.splitlines()[:30], "Tell me what it says."])}]
    first = take_turn(real, chat, max_tokens=30)
    whole_blocks = first.usage.prompt_tokens // BLOCK * BLOCK
    assert whole_blocks >= 4 * BLOCK
    for service in ("prefill", "decode", "lmcache", "kvindex", "postgres"):
        kill_and_await(real, service)
        with real.http as http:
            until(lambda: http.get("/readyz").status_code == httpx.codes.OK, timeout_s=ENGINE_S)
        again = take_turn(real, chat, max_tokens=30)
        print(f"\nafter {service} was killed: {again.cached_tokens} cached, {again.receipt}")
        assert again.text == first.text
        assert again.cached_tokens >= whole_blocks
        assert again.receipt["fallbacks"] == []


def test_a_stop_leaves_neither_processes_nor_shared_memory(real):
    members = [member for child in Home(real.home).read().children if child.name for member in family(child.name)]
    assert real.command("down").returncode == 0
    assert real.process.wait(timeout=60) == 0
    assert [member for member in members if is_alive(member)] == []
    assert set(Path("/dev/shm").glob("lmcache*")) <= SEGMENTS_BEFORE
    assert real.errors() == []
