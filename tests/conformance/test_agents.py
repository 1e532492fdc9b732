"""Recorded agents play whole tasks: loops of tools, thinking passed back, an answer broken off, and the prefix hit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal_testkit.cluster import BLOCK_TOKENS, Cluster
from shoal_testkit.grammars import check_stream
from shoal_testkit.plays import write_script
from shoal_testkit.tiny_tokenizer import write_tiny_tokenizer
from shoal_tokenizer.codec.api import Codec
from shoal_tokenizer.model_files import load_codec

from .codecs import api_of, shared_prefix, stream_of, token_ids
from .conftest import AGENTS, MODEL
from .recorded.agent import COUNT, DONE_TEXT, Agent, events_of

LEAST_HIT = 0.95
LEAST_TURNS = 5
EVENTS_BEFORE_THE_BREAK = 40
TOLD = {"ClaudeCode": "billing", "Cline": "temperature"}  # a word of a note that the receipt has
QWEN_LIKE = Path(__file__).parent / "recorded" / "qwen3_like.jinja"


class Play:
    """One agent, asking for real. Every answer is checked for its grammar, every later prompt for its hit."""

    def __init__(self, agent: Agent, codec: Codec, http: httpx.Client) -> None:
        self.agent = agent
        self.notes: list[str] = []
        self.turns = 0
        self._codec = codec
        self._http = http
        self._before: list[int] = []

    def turn(self) -> bool:
        """Ask once; True when tools were called, whose results the next turn sends."""
        token_ids, shared = self._next_prompt()
        raw = b"".join(self._events())
        check_stream(self.agent.path.partition("?")[0], raw)
        events = events_of(raw)
        prompt_tokens, hit_tokens = self.agent.usage(events)
        blocks = shared // BLOCK_TOKENS * BLOCK_TOKENS
        assert prompt_tokens == len(token_ids)
        assert hit_tokens >= LEAST_HIT * blocks, f"turn {self.turns}: {hit_tokens} of {blocks} shared tokens hit"
        self.notes += _receipt(events).get("notes", [])
        self.turns += 1
        return self.agent.hear(events)

    def broken_off(self) -> None:
        """The user interrupts while the answer comes."""
        self._next_prompt()
        raw = b""
        for piece in self._events():
            raw += piece
            if raw.count(b"\n\n") > EVENTS_BEFORE_THE_BREAK:
                break
        self.turns += 1
        self.agent.break_off(events_of(raw))

    def _next_prompt(self) -> tuple[list[int], int]:
        prompt = token_ids(self._codec, api_of(self.agent.path), self.agent.body())
        shared = shared_prefix(self._before, prompt)
        self._before = prompt
        return prompt, shared

    def _events(self) -> Iterator[bytes]:
        headers = {**self.agent.headers, "x-shoal-receipt": "1"}
        with self._http.stream("POST", self.agent.path, json=self.agent.body(), headers=headers) as answer:
            assert answer.status_code == httpx.codes.OK, answer.read()
            yield from answer.iter_raw()


def _receipt(events: list[dict[str, Any]]) -> dict[str, Any]:
    """It stands in the last JSON object of a stream, or inside of the response there."""
    for event in reversed(events):
        for holder in (event, event.get("response") or {}):
            if "shoal_receipt" in holder:
                receipt: dict[str, Any] = holder["shoal_receipt"]
                return receipt
    raise AssertionError("no receipt in the stream")


@pytest.mark.parametrize("kind", AGENTS, ids=lambda kind: kind.__name__)
async def test_an_agent_plays_its_task_is_interrupted_and_goes_on(
    kind: type[Any], deepseek: Cluster, deepseek_codec: Codec
) -> None:
    agent: Agent = kind(MODEL)
    with httpx.Client(base_url=deepseek.url, trust_env=False, timeout=60) as http:
        play = Play(agent, deepseek_codec, http)
        agent.say(agent.task)
        while play.turn():
            pass
        assert "12 tests pass" in agent.text()
        agent.say(COUNT)
        play.broken_off()
        await deepseek.is_idle()
        agent.say(agent.goes_on)
        assert not play.turn()
    assert agent.text() == DONE_TEXT
    assert play.turns > LEAST_TURNS
    print(kind.__name__, sorted(set(play.notes)))
    assert any(TOLD.get(kind.__name__, "") in note for note in [*play.notes, ""])


NEWER_FIELDS = [
    {"thinking": {"type": "adaptive", "display": "summarized"}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}, "context_management": None},
    {"diagnostics": {"previous_message_id": "msg_0"}},
]


@pytest.mark.parametrize("fields", NEWER_FIELDS, ids=lambda fields: next(iter(fields)))
def test_other_versions_of_claude_code_are_understood(deepseek: Cluster, fields: dict[str, Any]) -> None:
    agent = next(kind for kind in AGENTS if kind.__name__ == "ClaudeCode")(MODEL)
    agent.say("Say hello.")
    body = {name: value for name, value in (agent.body() | fields).items() if value is not None}
    with httpx.Client(base_url=deepseek.url, trust_env=False, timeout=60) as http:
        answer = http.post(agent.path, json=body | {"stream": False, "max_tokens": 1025}, headers=agent.headers)
    assert answer.status_code == httpx.codes.OK, answer.text


@pytest.fixture(scope="session")
def template_codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("qwen") / "model")
    (folder / "chat_template.jinja").write_text(QWEN_LIKE.read_text())
    return load_codec(folder, MODEL, 64)


@pytest.fixture(scope="session")
def answers(deepseek_folder: Path) -> dict[str, list[list[int]]]:
    """What the model says in each agent's play, as tokens, turn by turn."""
    found = {}
    for kind in AGENTS:
        path = deepseek_folder.parent / f"{kind.__name__}.jsonl"
        write_script(path, deepseek_folder / "tokenizer.json", kind.lines)
        found[kind.__name__] = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    return found


@pytest.mark.parametrize("family", ["deepseek_codec", "template_codec"])
@pytest.mark.parametrize("kind", AGENTS, ids=lambda kind: kind.__name__)
def test_a_loop_keeps_its_prefix(
    kind: type[Any],
    family: str,
    request: pytest.FixtureRequest,
    deepseek_codec: Codec,
    answers: dict[str, list[list[int]]],
) -> None:
    """Whatever family renders it, a turn that sends results begins with nearly all of the turn before."""
    codec: Codec = request.getfixturevalue(family)
    agent: Agent = kind(MODEL)
    agent.say(agent.task)
    api = api_of(agent.path)
    before: list[int] = []
    for answer in answers[kind.__name__][:-2]:
        prompt = token_ids(codec, api, agent.body())
        assert shared_prefix(before, prompt) >= LEAST_HIT * len(before)
        raw = stream_of(codec, deepseek_codec, api, agent.body(), answer)
        check_stream(agent.path.partition("?")[0], raw)
        before, goes_on = prompt, agent.hear(events_of(raw))
    assert not goes_on and "12 tests pass" in agent.text()
