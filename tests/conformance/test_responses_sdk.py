"""Responses by the official SDK: answers, loops, what is stored, what runs in the background."""

import json
import time
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from shoal_testkit.cluster import Cluster

MODEL = "deepseek-v4"
STEP: dict[str, Any] = {
    "type": "function",
    "name": "step",
    "description": "Take one step.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"number": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["number", "note"],
    },
}
HELLO_TEXT = "Hello there, friend. And more."
OFF: dict[str, Any] = {"reasoning": {"effort": "none"}}
POLL_S = 30.0


class Place(BaseModel):
    city: str
    country: str
    people: int


def test_an_answer_has_a_reasoning_item_text_and_usage(openai_client: openai.OpenAI) -> None:
    answer = openai_client.responses.create(model=MODEL, input="Say hello.")
    assert answer.output_text == HELLO_TEXT and answer.status == "completed"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    usage = answer.usage
    assert usage and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_a_stream_says_the_same(openai_client: openai.OpenAI) -> None:
    with openai_client.responses.stream(model=MODEL, input="Say hello.") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == HELLO_TEXT
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == HELLO_TEXT


@pytest.mark.parametrize("is_stateful", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_loop_of_five_calls(openai_client: openai.OpenAI, is_stream: bool, is_stateful: bool) -> None:
    """Either the whole history is sent each time, or only what is new and the response before."""
    history: list[Any] = [{"role": "user", "content": "Climb the stairs."}]
    fresh, previous, taken = history, None, []
    for _ in range(10):
        request: dict[str, Any] = {"model": MODEL, "tools": [STEP], "store": is_stateful}
        request |= {"input": fresh, "previous_response_id": previous} if is_stateful else {"input": history}
        answer = _ask(openai_client, request, is_stream)
        history = [*history, *(item.model_dump(exclude_none=True) for item in answer.output)]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        (called,) = calls
        number = json.loads(called.arguments)["number"]
        taken.append(number)
        fresh = [{"type": "function_call_output", "call_id": called.call_id, "output": f"stair {number}"}]
        history, previous = [*history, *fresh], answer.id
    assert taken == [1, 2, 3, 4, 5]
    assert answer.output_text.endswith("I am at the top.")


def _ask(client: openai.OpenAI, request: dict[str, Any], is_stream: bool) -> Any:
    if not is_stream:
        return client.responses.create(**request)
    with client.responses.create(**request, stream=True) as stream:
        *_, last = stream
        return last.response


def test_structured_output_is_parsed(openai_client: openai.OpenAI) -> None:
    answer = openai_client.responses.parse(model=MODEL, input="Where is Paris?", text_format=Place)
    assert answer.output_parsed == Place(city="Paris", country="France", people=2_100_000)


def test_a_custom_tool_gets_its_text(openai_client: openai.OpenAI) -> None:
    tool: Any = {"type": "custom", "name": "apply_patch", "description": "Apply a patch."}
    answer = openai_client.responses.create(model=MODEL, input="Patch it.", tools=[tool])
    (called,) = [item for item in answer.output if item.type == "custom_tool_call"]
    assert called.input == '*** Begin Patch\n+ "ünï" \\ 😀\n*** End Patch'


def test_reasoning_can_be_carried_by_the_client(openai_client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "store": False, "include": ["reasoning.encrypted_content"]}
    first = openai_client.responses.create(input="Climb the stairs.", tools=[STEP], **asked)
    reasoning, *_ = first.output
    assert reasoning.type == "reasoning" and reasoning.encrypted_content


def test_stored_responses_are_retrieved_listed_and_deleted(openai_client: openai.OpenAI) -> None:
    client = openai_client.responses
    first = client.create(model=MODEL, input="Say hello.", metadata={"of": "test"})
    found = client.retrieve(first.id)
    assert (found.id, found.output_text, found.metadata) == (first.id, HELLO_TEXT, {"of": "test"})
    (item,) = client.input_items.list(first.id)
    assert item.type == "message" and item.content[0].text == "Say hello."
    client.delete(first.id)
    for call in (client.retrieve, client.delete):
        with pytest.raises(openai.NotFoundError):
            call(first.id)
    with pytest.raises(openai.NotFoundError) as error:
        client.create(model=MODEL, input="x", previous_response_id=first.id)
    assert error.value.code == "previous_response_not_found"
    unkept = client.create(model=MODEL, input="Say hello.", store=False)
    with pytest.raises(openai.NotFoundError):
        client.retrieve(unkept.id)


def test_what_runs_in_the_background_is_polled_to_its_end(openai_client: openai.OpenAI) -> None:
    client = openai_client.responses
    answer = client.create(model=MODEL, input="Say hello.", background=True)
    assert answer.status in ("queued", "in_progress")
    deadline = time.monotonic() + POLL_S
    while answer.status in ("queued", "in_progress") and time.monotonic() < deadline:
        time.sleep(0.1)
        answer = client.retrieve(answer.id)
    assert (answer.status, answer.output_text) == ("completed", HELLO_TEXT)


async def test_what_runs_in_the_background_is_cancelled(deepseek: Cluster, openai_client: openai.OpenAI) -> None:
    client = openai_client.responses
    answer = client.create(model=MODEL, input="Count for long.", background=True)
    cancelled = client.cancel(answer.id)
    assert cancelled.status == "cancelled"
    await deepseek.is_idle()
    assert client.retrieve(answer.id).status == "cancelled"
    done = client.create(model=MODEL, input="Say hello.")
    with pytest.raises(openai.BadRequestError):
        client.cancel(done.id)


def test_an_answer_that_is_cut_is_incomplete(openai_client: openai.OpenAI) -> None:
    answer = openai_client.responses.create(model=MODEL, input="Say hello at once.", max_output_tokens=16, **OFF)
    cut = openai_client.responses.create(model=MODEL, input="Count for long.", max_output_tokens=16)
    assert answer.status == "completed"
    assert cut.status == "incomplete" and cut.incomplete_details
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_errors_are_the_sdks_own(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.create(model="nobody", input="x")
    for refused in ({"tools": [{"type": "file_search", "vector_store_ids": ["x"]}]}, {"conversation": "conv_1"}):
        with pytest.raises(openai.BadRequestError) as error:
            openai_client.responses.create(model=MODEL, input="x", **refused)  # type: ignore[arg-type]
        assert error.value.param and error.value.param.startswith(next(iter(refused)))
