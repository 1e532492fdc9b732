"""Chat Completions answers: the grammar of the stream, and the body."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

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
    ShownToken,
    Text,
    Usage,
)
from shoal_tokenizer.codec.events.chat_completions import write_chat_completion

Shapes = Callable[..., AnswerShape]
USAGE = Usage(prompt_tokens=10, hit_tokens=8, completion_tokens=5, reasoning_tokens=3)
SHOWN_USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 3},
    "prompt_cache_hit_tokens": 8,
    "prompt_cache_miss_tokens": 2,
}
TOKEN = ShownToken(b"\xc3", -0.5, [(b"\xc3", -0.5), (b"x", float("-inf"))])
STOP = AnswerEnd(Finish.STOP, USAGE)
ROLE = {"role": "assistant", "content": "", "refusal": None}
CALLS: list[Part] = [
    Reasoning("Two "),
    Reasoning("calls."),
    Text("I look."),
    CallBegin("look"),
    CallArguments('{"at"'),
    CallArguments(": 1}"),
    CallEnd(),
    CallBegin("patch"),
    CallArguments('{"input": "a \\"b'),
    CallArguments('\\"\\ud83d'),
    CallArguments('\\ude00"}'),
    CallEnd(),
]


def events(raw: bytes) -> list[Any]:
    """The JSON objects of SSE text, strictly framed; [DONE] as a string."""
    parts = raw.split(b"\n\n")
    assert parts.pop() == b""
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [part[6:].decode() if part == b"data: [DONE]" else json.loads(part[6:]) for part in parts]


def stream(shape: AnswerShape, deltas: Sequence[Delta], end: AnswerEnd = STOP) -> list[Any]:
    """The whole answer; [DONE] is checked and left out."""
    writer = write_chat_completion(shape)
    raw = writer.open(10, 8) + b"".join(map(writer.delta, deltas)) + writer.finish(end)
    assert writer.events == raw.count(b"\n\n") - 1  # [DONE] is no event
    assert writer.kept_body is None
    seen = events(raw)
    assert seen.pop() == "[DONE]"
    return seen


def said(seen: Sequence[Any]) -> list[Any]:
    return [event["choices"][0]["delta"] for event in seen if event["choices"]]


def body(shape: AnswerShape, deltas: Sequence[Delta], end: AnswerEnd = STOP) -> Any:
    writer = write_chat_completion(shape)
    assert writer.open(10, 8) + b"".join(map(writer.delta, deltas)) == b""
    return json.loads(writer.finish(end))


def test_a_stream_is_role_deltas_reason_done(a_shape: Shapes) -> None:
    seen = stream(a_shape(), [Delta([Text('He said "\n\u2028é"')]), Delta(), Delta([Text("!")])])
    parsed = [ChatCompletionChunk.model_validate(event, strict=True) for event in seen]
    assert said(seen) == [ROLE, {"content": 'He said "\n\u2028é"'}, {"content": "!"}, {}]
    assert [chunk.choices[0].finish_reason for chunk in parsed] == [None, None, None, "stop"]
    assert {(chunk.id, chunk.created, chunk.model) for chunk in parsed} == {("chatcmpl-1", 1700000000, "tiny")}
    assert not any("usage" in event for event in seen)


def test_reasoning_text_two_calls_and_usage_come_in_order(a_shape: Shapes) -> None:
    shape = a_shape(has_usage_event=True, has_tools=True, custom_tools=("patch",))
    seen = stream(shape, [Delta(CALLS[:5]), *(Delta([part]) for part in CALLS[5:])])
    function = {"name": "look", "arguments": ""}
    assert said(seen) == [
        ROLE,
        {"reasoning_content": "Two "},
        {"reasoning_content": "calls."},
        {"content": "I look."},
        {"tool_calls": [{"index": 0, "id": "call_1_0", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"at"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "call_1_1", "type": "custom", "custom": {"name": "patch", "input": ""}},
            ]
        },
        {"tool_calls": [{"index": 1, "custom": {"input": 'a "b'}}]},
        {"tool_calls": [{"index": 1, "custom": {"input": '"'}}]},
        {"tool_calls": [{"index": 1, "custom": {"input": "\N{GRINNING FACE}"}}]},
        {},
    ]
    reasons = [event["choices"][0]["finish_reason"] for event in seen[:-1]]
    assert set(reasons[:-1]) == {None} and reasons[-1] == "tool_calls"
    assert all(event["usage"] is None for event in seen[:-1])
    assert (seen[-1]["choices"], seen[-1]["usage"]) == ([], SHOWN_USAGE)


def test_a_body_has_reasoning_and_calls(a_shape: Shapes) -> None:
    shape = a_shape(is_stream=False, has_tools=True, custom_tools=("patch",))
    answer = body(shape, [Delta(CALLS[:4]), Delta(CALLS[4:])])
    choice = ChatCompletion.model_validate(answer, strict=True).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "Two calls."
    custom = {"name": "patch", "input": 'a "b"\N{GRINNING FACE}'}
    assert message["tool_calls"] == [
        {"id": "call_1_0", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
        {"id": "call_1_1", "type": "custom", "custom": custom},
    ]
    assert answer["usage"] == SHOWN_USAGE


@pytest.mark.parametrize(
    ("parts", "content"),
    [(CALLS[3:7], None), ([Text("")], ""), ([], ""), ([Reasoning("r")], ""), ([Text("x"), *CALLS[3:7]], "x")],
)
def test_content_is_null_only_where_there_are_calls_alone(
    a_shape: Shapes, parts: list[Part], content: str | None
) -> None:
    message = body(a_shape(is_stream=False), [Delta(parts)])["choices"][0]["message"]
    assert message["content"] == content
    assert ("reasoning_content" in message) == any(isinstance(part, Reasoning) for part in parts)
    assert ("tool_calls" in message) == any(isinstance(part, CallBegin) for part in parts)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_call_that_was_cut_ends_for_length(a_shape: Shapes, is_stream: bool) -> None:
    end = AnswerEnd(Finish.LENGTH, USAGE)
    if is_stream:
        assert stream(a_shape(), [Delta(CALLS[3:5])], end)[-1]["choices"][0]["finish_reason"] == "length"
        return
    answer = body(a_shape(is_stream=False), [Delta(CALLS[3:5])], end)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"at"'


def test_another_instance_makes_the_same_ids_and_goes_on_inside_a_call(a_shape: Shapes) -> None:
    shape = a_shape(has_tools=True, custom_tools=("patch",))
    whole, resumed = write_chat_completion(shape), write_chat_completion(shape)
    for writer in (whole, resumed):
        writer.open(1, 0)
    for part in CALLS[:9]:
        whole.delta(Delta([part]))
    resumed.delta(Delta(CALLS[:9]))
    assert whole.delta(Delta(CALLS[9:])) == resumed.delta(Delta(CALLS[9:])) != b""


def test_usage_comes_in_an_event_without_choices_when_asked(a_shape: Shapes) -> None:
    seen = stream(a_shape(has_usage_event=True), [Delta([Text("a")])], AnswerEnd(Finish.LENGTH, USAGE))
    assert [event["usage"] for event in seen[:-1]] == [None] * 3
    assert seen[-1]["choices"] == [] and seen[-1]["usage"] == SHOWN_USAGE


def test_the_receipt_stands_in_the_last_object(a_shape: Shapes) -> None:
    end = AnswerEnd(Finish.STOP, USAGE, receipt_json=b'{"attempts":1}')
    for changes in ({}, {"has_usage_event": True}):
        seen = stream(a_shape(**changes), [], end)
        assert seen[-1]["shoal_receipt"] == {"attempts": 1}
        assert not any("shoal_receipt" in event for event in seen[:-1])
    assert body(a_shape(is_stream=False), [], end)["shoal_receipt"] == {"attempts": 1}
    assert "shoal_receipt" not in body(a_shape(is_stream=False), [])


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_failure_is_an_error(a_shape: Shapes, is_stream: bool) -> None:
    writer = write_chat_completion(a_shape(is_stream=is_stream))
    writer.open(1, 0)
    writer.delta(Delta([Text("a")]))
    raw = writer.fail(ShownFailure("engine_failed", "The engine failed; try again.", is_callers=False), b'{"n":3}')
    error = {
        "message": "The engine failed; try again.",
        "type": "server_error",
        "param": None,
        "code": "engine_failed",
    }
    told = {"error": error, "shoal_receipt": {"n": 3}}
    assert (events(raw) == [told, "[DONE]"]) if is_stream else (json.loads(raw) == told)
    assert writer.cancel() == b""


def test_logprobs_have_openais_shape(a_shape: Shapes) -> None:
    deltas = [Delta([Reasoning("r"), Text("é"), *CALLS[3:5]], [TOKEN]), Delta([], [TOKEN]), Delta([Text("x")])]
    seen = stream(a_shape(has_logprobs=True), deltas)
    assert [event["choices"][0]["logprobs"] is not None for event in seen] == [
        *(False, False, True, False, False),
        *(True, False, False),
    ]
    assert said(seen)[2] == {"content": "é"} and said(seen)[5] == {"content": ""}
    entry = ChatCompletionChunk.model_validate(seen[2]).choices[0].logprobs
    assert entry is not None and entry.content is not None
    assert entry.content[0].bytes == [195] and entry.content[0].token == "\N{REPLACEMENT CHARACTER}"
    assert [(top.token, top.logprob) for top in entry.content[0].top_logprobs][1] == ("x", -9999.0)
    whole = body(a_shape(is_stream=False, has_logprobs=True), deltas)["choices"][0]["logprobs"]
    assert len(whole["content"]) == 2


PARTS = st.one_of(
    st.text(min_size=1).map(Text),
    st.text(min_size=1).map(Reasoning),
    st.sampled_from(["look", "patch", '"odd"\n']).map(CallBegin),
    st.text(min_size=1).map(CallArguments),
    st.sampled_from(['{"input": "', "\\ud83d", "\\ude00", "\\", '"}', "\ud7ff"]).map(CallArguments),
    st.just(CallEnd()),
)


@settings(deadline=None)
@given(st.lists(PARTS, max_size=8), st.booleans())
def test_whatever_comes_is_json_and_the_body_is_the_stream(parts: list[Part], is_batched: bool) -> None:
    shape = AnswerShape(Api.CHAT_COMPLETIONS, "chatcmpl-1", 1, "tiny", True, custom_tools=("patch",))
    seen = stream(shape, [Delta(parts)] if is_batched else [Delta([part]) for part in parts])
    whole = body(
        AnswerShape(Api.CHAT_COMPLETIONS, "chatcmpl-1", 1, "tiny", False, custom_tools=("patch",)), [Delta(parts)]
    )
    message = whole["choices"][0]["message"]
    told = said(seen)
    assert "".join(delta.get("content") or "" for delta in told) == (message["content"] or "")
    assert "".join(delta.get("reasoning_content", "") for delta in told) == message.get("reasoning_content", "")
    calls: dict[int, str] = {}
    for entry in (entry for delta in told for entry in delta.get("tool_calls", ())):
        called = entry.get("function") or entry.get("custom")
        calls[entry["index"]] = calls.get(entry["index"], "") + called.get("arguments", called.get("input"))
    shown = [call.get("function") or call.get("custom") for call in message.get("tool_calls", ())]
    assert list(calls.values()) == [call.get("arguments", call.get("input")) for call in shown]
    assert whole["choices"][0]["finish_reason"] == seen[-1]["choices"][0]["finish_reason"]
