"""Messages by the official SDK."""

import json
from typing import Any

import anthropic
import pytest

from shoal_testkit.cluster import Cluster

MODEL = "deepseek-v4"
STEP: dict[str, Any] = {
    "name": "step",
    "description": "Take one step.",
    "input_schema": {
        "type": "object",
        "properties": {"number": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["number", "note"],
    },
}
THINKING: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
OFF: dict[str, Any] = {"thinking": {"type": "disabled"}}


def asked(text: str, **others: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 2048, "messages": [{"role": "user", "content": text}], **others}


def test_an_answer_has_a_signed_thought_text_and_usage(anthropic_client: anthropic.Anthropic) -> None:
    answer = anthropic_client.messages.create(**asked("Say hello.", **THINKING))
    thought, text = answer.content
    assert thought.type == "thinking" and thought.thinking == "They greet me." and thought.signature
    assert text.type == "text" and text.text == "Hello there, friend. And more."
    assert (answer.stop_reason, answer.role, answer.type) == ("end_turn", "assistant", "message")
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0


def test_a_stream_says_the_same(anthropic_client: anthropic.Anthropic) -> None:
    whole = anthropic_client.messages.create(**asked("Say hello.", **THINKING))
    with anthropic_client.messages.stream(**asked("Say hello.", **THINKING)) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == "Hello there, friend. And more."
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_loop_of_five_calls(anthropic_client: anthropic.Anthropic, is_stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Climb the stairs."}]
    taken = []
    for _ in range(10):
        request: dict[str, Any] = {"model": MODEL, "max_tokens": 2048, "messages": messages, "tools": [STEP]}
        if is_stream:
            with anthropic_client.messages.stream(**request, **THINKING) as stream:
                answer: Any = stream.get_final_message()
        else:
            answer = anthropic_client.messages.create(**request, **THINKING)
        messages.append({"role": "assistant", "content": answer.content})
        uses = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason == ("tool_use" if uses else "end_turn")
        if not uses:
            break
        (use,) = uses
        taken.append(use.input["number"])
        result = {"type": "tool_result", "tool_use_id": use.id, "content": f"stair {use.input['number']}"}
        messages.append({"role": "user", "content": [result]})
    assert taken == [1, 2, 3, 4, 5]
    assert answer.content[-1].text == "I am at the top."


def test_the_second_turn_of_a_loop_reads_the_first_from_the_store(anthropic_client: anthropic.Anthropic) -> None:
    system = "Be brief. " * 600
    first = anthropic_client.messages.create(**asked("Say hello.", system=system, **OFF))
    again = anthropic_client.messages.create(**asked("Say hello.", system=system, **OFF))
    assert first.usage.cache_creation_input_tokens == again.usage.cache_creation_input_tokens == 0
    total = again.usage.input_tokens + (again.usage.cache_read_input_tokens or 0)
    assert (again.usage.cache_read_input_tokens or 0) >= 0.9 * total


def test_tokens_are_counted_as_they_are_billed(anthropic_client: anthropic.Anthropic) -> None:
    counted = anthropic_client.messages.count_tokens(
        model=MODEL, messages=[{"role": "user", "content": "Say hello."}], tools=[STEP], system="Be brief."
    )
    answer = anthropic_client.messages.create(**asked("Say hello.", tools=[STEP], system="Be brief."))
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_stop_sequences_prefill_and_length(anthropic_client: anthropic.Anthropic) -> None:
    create = anthropic_client.messages.create
    stopped = create(**asked("Say hello at once.", stop_sequences=["friend"], **OFF))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "friend")
    assert stopped.content[0].type == "text" and stopped.content[0].text == "Hello there, "
    cut = create(**asked("Say hello at once.", **OFF) | {"max_tokens": 3})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    prefilled = asked("Unheard of.", **OFF) | {"max_tokens": 4}
    prefilled["messages"] = [*prefilled["messages"], {"role": "assistant", "content": "I begin with"}]
    assert create(**prefilled).usage.output_tokens == 4


def test_structured_output_and_a_required_call(anthropic_client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    answer = anthropic_client.messages.create(
        **asked("Unheard of.", output_config={"format": {"type": "json_schema", "schema": schema}}, **OFF)
    )
    assert answer.content[0].type == "text" and set(json.loads(answer.content[0].text)) == {"yes"}
    tool = {"name": "pick", "input_schema": schema}
    forced = anthropic_client.messages.create(**asked("Unheard of.", tools=[tool], tool_choice={"type": "any"}, **OFF))
    assert forced.stop_reason == "tool_use"
    assert next(block.name for block in forced.content if block.type == "tool_use") == "pick"


async def test_a_stream_that_is_closed_leaves_nothing_running(
    deepseek: Cluster, anthropic_client: anthropic.Anthropic
) -> None:
    with anthropic_client.messages.stream(**asked("Count for long.")) as stream:
        for _number, _event in zip(range(20), stream, strict=False):
            pass
    await deepseek.is_idle()


def test_errors_are_the_sdks_own(anthropic_client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.create(**asked("x") | {"model": "nobody"})
    with pytest.raises(anthropic.BadRequestError) as error:
        anthropic_client.messages.create(**asked("x", tools=[{"type": "web_search_20250305", "name": "web_search"}]))
    assert isinstance(error.value.body, dict) and error.value.body["type"] == "error"
    assert error.value.body["error"]["type"] == "invalid_request_error"
    assert error.value.request_id
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        anthropic_client.messages.create(
            model=MODEL,
            max_tokens=5,
            messages=[{"role": "user", "content": [image]}],  # type: ignore[list-item]
        )


def test_models_have_anthropics_shape(anthropic_client: anthropic.Anthropic) -> None:
    (model,) = anthropic_client.models.list()
    assert (model.id, model.type) == (MODEL, "model") and model.created_at
    assert anthropic_client.models.retrieve(MODEL).id == MODEL
