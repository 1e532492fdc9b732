"""`shoal up` with the packaged model: the official SDKs on a real engine, with tools, schemas and stored responses.

The model is too small to choose well; what the engine holds it to is what is looked at.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from pydantic import BaseModel

from shoal_testkit.checked_streams import Streams, keeping

from .conftest import READY_SIGN, Running, shoal_up

MODEL = "SmolLM2-135M-Instruct"
READY_S = 420.0
POLL_S = 60.0
CALLS = 5
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Lyon"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ASK = "What is the weather in the city?"

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


class Answer(BaseModel):
    is_sure: bool
    city: str


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with shoal_up(tmp_path_factory.mktemp("home"), SHOAL_ENGINE_DTYPE="float32") as running:
        running.wait_for(READY_SIGN, timeout_s=READY_S)
        yield running
        assert running.errors() == []


@pytest.fixture
def streams() -> Iterator[Streams]:
    streams = Streams()
    yield streams
    streams.check()


@pytest.fixture
def chat(real: Running, streams: Streams) -> Iterator[openai.OpenAI]:
    with keeping(httpx, streams) as http:
        yield openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=120, http_client=http)


@pytest.fixture
def claude(real: Running, streams: Streams) -> Iterator[anthropic.Anthropic]:
    with keeping(httpx2, streams) as http:
        yield anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0, timeout=120, http_client=http)


@pytest.mark.parametrize("is_stream", [False, True])
def test_chat_completions_make_five_calls_in_a_loop(chat: openai.OpenAI, is_stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "look", "strict": True, "parameters": CITY}}
    messages: list[Any] = [{"role": "user", "content": ASK}]
    for number in range(CALLS):
        asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": [tool], "tool_choice": "required"}
        asked |= {"parallel_tool_calls": False, "max_tokens": 200, "temperature": 0}
        if is_stream:
            with chat.chat.completions.stream(**asked) as stream:
                choice: Any = stream.get_final_completion().choices[0]
        else:
            choice = chat.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Lyon")
        messages += [
            {
                "role": "assistant",
                "content": choice.message.content,
                "tool_calls": [call.model_dump(exclude_none=True)],
            },
            {"role": "tool", "tool_call_id": call.id, "content": f"{number} degrees"},
        ]
    final = chat.chat.completions.create(model=MODEL, messages=messages, tools=[tool], tool_choice="none", max_tokens=8)
    assert final.choices[0].message.content


def test_chat_completions_hold_schemas_stops_and_lengths(chat: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "Is Paris a city? Answer in JSON."}]
    parsed = chat.chat.completions.parse(model=MODEL, messages=asked, response_format=Answer, max_tokens=300)
    assert parsed.choices[0].message.parsed is not None
    cut = chat.chat.completions.create(model=MODEL, messages=asked, max_tokens=3)
    assert (cut.choices[0].finish_reason, cut.usage and cut.usage.completion_tokens) == ("length", 3)
    both = chat.chat.completions.create(model=MODEL, messages=asked, max_tokens=12, n=2, seed=7, temperature=1.5)
    first, second = (choice.message.content for choice in both.choices)
    assert first and second and first != second
    text = chat.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=5, temperature=0)
    assert "Paris" in text.choices[0].text


@pytest.mark.parametrize("is_stream", [False, True])
def test_responses_make_five_calls_in_a_loop_from_what_is_stored(chat: openai.OpenAI, is_stream: bool) -> None:
    tool: dict[str, Any] = {"type": "function", "name": "look", "strict": True, "parameters": CITY}
    fresh: Any = ASK
    previous: str | None = None
    for number in range(CALLS):
        asked: dict[str, Any] = {"model": MODEL, "input": fresh, "tools": [tool], "previous_response_id": previous}
        asked |= {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200, "temperature": 0}
        if is_stream:
            *_, last = chat.responses.create(**asked, stream=True)
            answer: Any = last.response
        else:
            answer = chat.responses.create(**asked)
        (call,) = [item for item in answer.output if item.type == "function_call"]
        assert json.loads(call.arguments)["city"] in ("Paris", "Lyon")
        fresh = [{"type": "function_call_output", "call_id": call.call_id, "output": f"{number} degrees"}]
        previous = answer.id
    assert len(list(chat.responses.input_items.list(str(previous)))) == 1


def test_responses_hold_schemas_and_run_in_the_background(chat: openai.OpenAI) -> None:
    client = chat.responses
    parsed = client.parse(model=MODEL, input="Is Paris a city? JSON.", text_format=Answer, max_output_tokens=300)
    assert parsed.output_parsed is not None
    answer = client.create(model=MODEL, input="Say hello.", background=True, max_output_tokens=20)
    deadline = time.monotonic() + POLL_S
    while answer.status in ("queued", "in_progress") and time.monotonic() < deadline:
        time.sleep(0.1)
        answer = client.retrieve(answer.id)
    assert answer.status in ("completed", "incomplete") and answer.output_text
    running = client.create(model=MODEL, input="Count to a thousand.", background=True)
    assert client.cancel(running.id).status in ("cancelled", "completed")
    client.delete(running.id)
    with pytest.raises(openai.NotFoundError):
        client.retrieve(running.id)


@pytest.mark.parametrize("is_stream", [False, True])
def test_messages_make_five_calls_in_a_loop(claude: anthropic.Anthropic, is_stream: bool) -> None:
    tool: Any = {"name": "look", "strict": True, "input_schema": CITY}
    messages: list[Any] = [{"role": "user", "content": ASK}]
    for number in range(CALLS):
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": messages, "tools": [tool]}
        asked |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        if is_stream:
            with claude.messages.stream(**asked) as stream:
                answer: Any = stream.get_final_message()
        else:
            answer = claude.messages.create(**asked)
        assert answer.stop_reason == "tool_use"
        (use,) = [block for block in answer.content if block.type == "tool_use"]
        assert use.input["city"] in ("Paris", "Lyon")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": f"{number} degrees"}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    counted = claude.messages.count_tokens(model=MODEL, messages=messages, tools=[tool])
    final = claude.messages.create(model=MODEL, max_tokens=8, messages=messages, tools=[tool])
    assert counted.input_tokens == final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)


def test_messages_hold_schemas_and_go_on_with_a_prefill(claude: anthropic.Anthropic) -> None:
    form = {"format": {"type": "json_schema", "schema": CITY}}
    asked: list[Any] = [{"role": "user", "content": "Which city? JSON."}]
    answer: Any = claude.messages.create(model=MODEL, max_tokens=200, messages=asked, output_config=form)  # type: ignore[call-overload]
    assert json.loads(answer.content[0].text)["city"] in ("Paris", "Lyon")
    prefilled = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "It is"},
    ]
    went_on: Any = claude.messages.create(model=MODEL, max_tokens=6, messages=prefilled)  # type: ignore[arg-type]
    assert went_on.content[0].text
