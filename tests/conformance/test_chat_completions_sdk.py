"""Chat Completions and Completions by the official SDK."""

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from shoal_testkit.cluster import Cluster

MODEL = "deepseek-v4"
STEP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "step",
        "description": "Take one step.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["number", "note"],
        },
    },
}
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
HELLO_TEXT = "Hello there, friend. And more."
AT_ONCE: list[Any] = [{"role": "user", "content": "Say hello at once."}]
WITHOUT_THINKING = {"thinking": {"type": "disabled"}}


class Place(BaseModel):
    city: str
    country: str
    people: int


def test_an_answer_has_reasoning_text_and_usage(openai_client: openai.OpenAI) -> None:
    answer = openai_client.chat.completions.create(model=MODEL, messages=HELLO)
    message = answer.choices[0].message
    assert message.content == HELLO_TEXT and message.refusal is None
    assert message.model_extra and message.model_extra["reasoning_content"] == "They greet me."
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details and usage.completion_tokens_details.reasoning_tokens
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_a_stream_says_the_same_and_ends_with_the_usage(openai_client: openai.OpenAI) -> None:
    whole = openai_client.chat.completions.create(model=MODEL, messages=HELLO)
    chunks = list(
        openai_client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert all(chunk.usage is None for chunk in chunks[:-1]) and chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == HELLO_TEXT
    assert "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas) == "They greet me."
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"


@pytest.mark.parametrize("is_stream", [False, True])
def test_several_answers_to_one_prompt_are_numbered_and_counted_together(
    openai_client: openai.OpenAI, is_stream: bool
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Both at once."}]
    one = openai_client.chat.completions.create(model=MODEL, messages=messages, tools=[STEP])
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": [STEP], "n": 3, "seed": 1}
    if is_stream:
        with openai_client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            answer: Any = stream.get_final_completion()
    else:
        answer = openai_client.chat.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls"] * 3
    calls = [call for choice in answer.choices for call in choice.message.tool_calls]
    assert len(calls) == 6 and len({call.id for call in calls}) == 6
    assert [json.loads(call.function.arguments)["number"] for call in calls] == [1, 2] * 3
    assert answer.usage and one.usage and answer.usage.prompt_tokens == one.usage.prompt_tokens
    assert answer.usage.completion_tokens == 3 * one.usage.completion_tokens
    assert (
        answer.usage.completion_tokens_details.reasoning_tokens
        == 3 * one.usage.completion_tokens_details.reasoning_tokens  # type: ignore[union-attr]
    )


@pytest.mark.parametrize("is_stream", [False, True])
def test_several_completions_of_one_text(openai_client: openai.OpenAI, is_stream: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Once upon", "n": 2, "max_tokens": 5}
    if is_stream:
        texts = {0: "", 1: ""}
        *chunks, last = openai_client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        usage = last.usage
    else:
        answer = openai_client.completions.create(**asked)
        texts = {choice.index: choice.text for choice in answer.choices}
        usage = answer.usage
    assert all(texts.values()) and len(texts) == 2
    assert usage is not None and usage.completion_tokens == 10


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_loop_of_five_calls(openai_client: openai.OpenAI, is_stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Climb the stairs."}]
    taken = []
    for _ in range(10):
        message = _ask(openai_client, messages, is_stream)
        messages.append(message)
        if not message.get("tool_calls"):
            break
        (called,) = message["tool_calls"]
        arguments = json.loads(called["function"]["arguments"])
        taken.append(arguments["number"])
        messages.append({"role": "tool", "tool_call_id": called["id"], "content": f"stair {arguments['number']}"})
    assert taken == [1, 2, 3, 4, 5]
    assert message["content"] == "I am at the top."
    assert len({m["tool_call_id"] for m in messages if m["role"] == "tool"}) == 5


def _ask(client: openai.OpenAI, messages: list[Any], is_stream: bool) -> dict[str, Any]:
    """One turn as an agent takes it: the message goes back into the conversation as it came."""
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": [STEP]}
    if not is_stream:
        answer = client.chat.completions.create(**asked)
        assert answer.choices[0].finish_reason == ("tool_calls" if answer.choices[0].message.tool_calls else "stop")
        return answer.choices[0].message.model_dump(exclude_none=True)
    with client.chat.completions.stream(**asked) as stream:
        for _event in stream:
            pass
        return stream.get_final_completion().choices[0].message.model_dump(exclude_none=True)


def test_two_calls_in_one_answer(openai_client: openai.OpenAI) -> None:
    asked = [{"role": "user", "content": "Both at once."}]
    answer = openai_client.chat.completions.create(model=MODEL, messages=asked, tools=[STEP])
    called = answer.choices[0].message.tool_calls or []
    assert [json.loads(call.function.arguments)["number"] for call in called if call.type == "function"] == [1, 2]
    assert len({call.id for call in called}) == 2


def test_structured_output_is_parsed(openai_client: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "Where is Paris?"}]
    answer = openai_client.chat.completions.parse(model=MODEL, messages=asked, response_format=Place)
    assert answer.choices[0].message.parsed == Place(city="Paris", country="France", people=2_100_000)


def test_a_schema_is_enforced_without_a_play(openai_client: openai.OpenAI) -> None:
    """Nobody plays this prompt: what comes is whatever the constraint lets through."""
    asked: list[Any] = [{"role": "user", "content": "Unheard of."}]
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    schema["additionalProperties"] = False
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=asked,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        extra_body=WITHOUT_THINKING,
        max_tokens=200,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert set(json.loads(answer.choices[0].message.content or "")) == {"yes"}


def test_a_required_call_is_made_without_a_play(openai_client: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "Unheard of."}]
    tool = {
        "type": "function",
        "function": {
            "name": "pick",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"side": {"enum": ["left", "right"]}},
                "required": ["side"],
                "additionalProperties": False,
            },
        },
    }
    for choice in ("required", {"type": "function", "function": {"name": "pick"}}):
        answer = openai_client.chat.completions.create(
            model=MODEL, messages=asked, tools=[tool, STEP], tool_choice=choice, parallel_tool_calls=False,
            extra_body=WITHOUT_THINKING, max_tokens=400,
        )  # fmt: skip
        assert answer.choices[0].finish_reason == "tool_calls"
        (called,) = answer.choices[0].message.tool_calls or []
        if choice != "required":
            assert called.type == "function" and called.function.name == "pick"
            assert json.loads(called.function.arguments)["side"] in ("left", "right")


def test_stop_strings_logprobs_and_length(openai_client: openai.OpenAI) -> None:
    create = openai_client.chat.completions.create
    stopped = create(model=MODEL, messages=HELLO, stop=["friend"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("Hello there, ", "stop")
    told = create(model=MODEL, messages=AT_ONCE, logprobs=True, top_logprobs=2, extra_body=WITHOUT_THINKING)
    logprobs = told.choices[0].logprobs
    assert logprobs and logprobs.content
    assert b"".join(bytes(token.bytes or ()) for token in logprobs.content).decode() == HELLO_TEXT
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
    cut = create(model=MODEL, messages=AT_ONCE, max_completion_tokens=3, extra_body=WITHOUT_THINKING)
    assert (cut.choices[0].finish_reason, cut.usage and cut.usage.completion_tokens) == ("length", 3)


async def test_a_stream_that_is_closed_leaves_nothing_running(deepseek: Cluster, openai_client: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "Count for long."}]
    with openai_client.chat.completions.create(model=MODEL, messages=asked, stream=True) as stream:
        for _number, _chunk in zip(range(20), stream, strict=False):
            pass
    await deepseek.is_idle()


def test_text_completions(openai_client: openai.OpenAI) -> None:
    create = openai_client.completions.create
    whole = create(model=MODEL, prompt="Once upon", max_tokens=8, logprobs=1)
    assert whole.object == "text_completion" and whole.usage and whole.usage.completion_tokens == 8
    assert whole.choices[0].logprobs and whole.choices[0].logprobs.tokens
    text = "".join(
        chunk.choices[0].text for chunk in create(model=MODEL, prompt="Once upon", max_tokens=8, stream=True)
    )
    assert text == whole.choices[0].text
    for refused in ({"echo": True}, {"suffix": "x"}):
        with pytest.raises(openai.BadRequestError) as error:
            create(model=MODEL, prompt="x", **refused)
        assert error.value.param == next(iter(refused))


def test_errors_are_the_sdks_own(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        openai_client.chat.completions.create(model="nobody", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as error:
        openai_client.chat.completions.create(model=MODEL, messages=HELLO, n=9)
    assert error.value.param == "n"
    picture = [{"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}]
    with pytest.raises(openai.BadRequestError, match="image"):
        openai_client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": picture}])


def test_models_are_listed_and_found(openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == [MODEL]
    assert openai_client.models.retrieve(MODEL).id == MODEL
