"""Messages, the answer: the events, the body, and what Anthropic's own library makes of them."""

import json
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from shoal_testkit.grammars import check_stream
from shoal_testkit.grammars.events import read_named
from shoal_tokenizer.codec.api import (
    AnswerEnd,
    AnswerShape,
    Api,
    CallArguments,
    CallBegin,
    CallEnd,
    Delta,
    Finish,
    Part,
    Reasoning,
    ShownFailure,
    Text,
    Usage,
)
from shoal_tokenizer.codec.events.carried_reasoning import carried
from shoal_tokenizer.codec.events.messages import write_message

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = Usage(prompt_tokens=10, hit_tokens=4, completion_tokens=7, reasoning_tokens=2)
WHOLE: list[Part] = [
    Reasoning("They "),
    Reasoning("ask."),
    Text("Look"),
    Text("ing."),
    CallBegin("look"),
    CallArguments('{"city":'),
    CallArguments(' "Par\\"is"}'),
    CallEnd(),
    CallBegin("stop"),
    CallArguments("{}"),
    CallEnd(),
]


def shape_of(**changes: Any) -> AnswerShape:
    fields: dict[str, Any] = {"is_stream": True, "has_tools": True, **changes}
    return AnswerShape(Api.MESSAGES, "msg_r1", 1_700_000_000, "tiny", **fields)


def said(parts: list[Part], finish: Finish = Finish.STOP, stop: str | None = None, **changes: Any) -> bytes:
    writer = write_message(shape_of(**changes))
    raw = writer.open(10, 3) + b"".join(writer.delta(Delta([part])) for part in parts)
    raw += writer.finish(AnswerEnd(finish, USAGE, stop, b'{"attempts":1}'))
    if changes.get("is_stream", True):
        assert writer.events == len(read_named(raw))
        for event in read_named(raw):
            if event["type"] != "ping":
                EVENTS.validate_python(event)
    return raw


def body_of(parts: list[Part], **changes: Any) -> dict[str, Any]:
    body = json.loads(said(parts, is_stream=False, **changes))
    Message.model_validate(body)
    return dict(body)


def streamed(raw: bytes) -> anthropic.types.Message:
    """What the SDK puts together of the bytes."""
    answer = httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=raw)
    with httpx2.Client(transport=httpx2.MockTransport(lambda _request: answer)) as http:
        client = anthropic.Anthropic(api_key="none", base_url="http://there", http_client=http)
        with client.messages.stream(model="tiny", max_tokens=5, messages=[{"role": "user", "content": "x"}]) as stream:
            return stream.get_final_message()


def test_a_whole_answer_is_the_same_streamed_and_not() -> None:
    raw = said(WHOLE)
    body = body_of(WHOLE)
    assert check_stream("/v1/messages", raw)["content"] == body["content"]
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert body["content"][2]["input"] == {"city": 'Par"is'}
    assert [block["id"] for block in body["content"][2:]] == ["toolu_r1_0", "toolu_r1_1"]
    assert (body["stop_reason"], body["shoal_receipt"]) == ("tool_use", {"attempts": 1})
    final = streamed(raw)
    assert [block.model_dump(exclude_none=True, exclude={"citations"}) for block in final.content] == body["content"]


def test_usage_counts_what_was_hit_apart() -> None:
    first, *_, last, _stop = read_named(said([Text("a")]))
    assert first["message"]["usage"] == {
        "input_tokens": 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 0,
    }
    assert (last["usage"]["input_tokens"], last["usage"]["cache_read_input_tokens"]) == (6, 4)
    assert (last["usage"]["output_tokens"], last["usage"]["output_tokens_details"]) == (7, {"thinking_tokens": 2})
    assert body_of([Text("a")])["usage"] == last["usage"]


def test_the_first_events_are_the_start_and_a_ping() -> None:
    assert [event["type"] for event in read_named(said([]))] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        (Finish.STOP, None, "end_turn"),
        (Finish.STOP, "END", "stop_sequence"),
        (Finish.LENGTH, None, "max_tokens"),
    ],
)
def test_stop_reasons(finish: Finish, stop: str | None, reason: str) -> None:
    told = check_stream("/v1/messages", said([Text("a")], finish, stop))
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, stop)


def test_a_thought_that_is_left_out_lies_in_its_signature() -> None:
    told = check_stream("/v1/messages", said(WHOLE, is_reasoning_shown=False))
    thought = told["content"][0]
    assert (thought["thinking"], carried(thought["signature"])) == ("", "They ask.")
    assert body_of(WHOLE, is_reasoning_shown=False)["content"][0] == thought


def test_a_call_that_was_cut_is_closed_and_can_be_read() -> None:
    parts: list[Part] = [CallBegin("look"), CallArguments('{"city": "Pa')]
    raw = said(parts, Finish.LENGTH)
    assert check_stream("/v1/messages", raw)["stop_reason"] == "max_tokens"
    assert streamed(raw).stop_reason == "max_tokens"
    assert body_of(parts, finish=Finish.LENGTH)["content"][0]["input"] == {}


@pytest.mark.parametrize(
    ("code", "is_callers", "kind"),
    [
        ("invalid_request", True, "invalid_request_error"),
        ("model_not_found", True, "not_found_error"),
        ("overloaded", False, "overloaded_error"),
        ("deadline_exceeded", False, "timeout_error"),
        ("engine_failed", False, "api_error"),
    ],
)
def test_failures_have_anthropics_shape(code: str, is_callers: bool, kind: str) -> None:
    failure = ShownFailure(code, "Try again.", is_callers)
    writer = write_message(shape_of())
    raw = writer.open(1, 0) + writer.delta(Delta([Text("a")])) + writer.fail(failure, b'{"a":1}')
    told = check_stream("/v1/messages", raw)
    assert told["error"] == {"type": kind, "message": "Try again."}
    assert (told["request_id"], told["shoal_receipt"]) == ("r1", {"a": 1})
    with pytest.raises(anthropic.APIError):
        streamed(raw)
    assert json.loads(write_message(shape_of(is_stream=False)).fail(failure, None)) == {
        key: value for key, value in told.items() if key != "shoal_receipt"
    }


TEXTS = st.text(min_size=1, max_size=5)
CALL = st.builds(lambda name, text: [CallBegin(name), CallArguments(json.dumps({"a": text})), CallEnd()], TEXTS, TEXTS)
PARTS = st.lists(TEXTS.map(lambda t: [Text(t)]) | TEXTS.map(lambda t: [Reasoning(t)]) | CALL, max_size=6)


@given(PARTS, st.booleans())
def test_any_answer_keeps_the_grammar_and_equals_its_body(groups: list[list[Part]], is_reasoning_shown: bool) -> None:
    parts = [part for group in groups for part in group]
    told = check_stream("/v1/messages", said(parts, is_reasoning_shown=is_reasoning_shown))
    assert told["content"] == body_of(parts, is_reasoning_shown=is_reasoning_shown)["content"]
