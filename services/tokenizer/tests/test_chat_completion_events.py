import json
from collections.abc import Callable
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from shoal_tokenizer.codec.api import AnswerShape, Delta, Finish, ShownFailure, ShownToken, Usage
from shoal_tokenizer.codec.events.chat_completions import write_chat_completion

Shapes = Callable[..., AnswerShape]
USAGE = Usage(prompt_tokens=10, hit_tokens=8, completion_tokens=2)
TOKEN = ShownToken(b"\xc3", -0.5, [(b"\xc3", -0.5), (b"x", float("-inf"))])


def events(raw: bytes) -> list[Any]:
    """The JSON objects of SSE text, strictly framed; [DONE] as a string."""
    parts = raw.split(b"\n\n")
    assert parts.pop() == b""
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [part[6:].decode() if part == b"data: [DONE]" else json.loads(part[6:]) for part in parts]


def test_a_stream_is_role_deltas_reason_done(a_shape: Shapes) -> None:
    writer = write_chat_completion(a_shape())
    raw = writer.delta(Delta('He said "\n\u2028é"')) + writer.delta(Delta("")) + writer.delta(Delta("!"))
    seen = events(raw + writer.finish(Finish.STOP, USAGE, None))
    assert seen.pop() == "[DONE]"
    parsed = [ChatCompletionChunk.model_validate(event, strict=True) for event in seen]
    assert [event["choices"][0]["delta"] for event in seen] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": 'He said "\n\u2028é"'},
        {"content": "!"},
        {},
    ]
    assert [chunk.choices[0].finish_reason for chunk in parsed] == [None, None, None, "stop"]
    assert {(chunk.id, chunk.created, chunk.model) for chunk in parsed} == {("chatcmpl-1", 1700000000, "tiny")}
    assert not any("usage" in event for event in seen)


def test_usage_comes_in_an_event_without_choices_when_asked(a_shape: Shapes) -> None:
    writer = write_chat_completion(a_shape(has_usage_event=True))
    seen = events(writer.delta(Delta("a")) + writer.finish(Finish.LENGTH, USAGE, None))
    assert [event["usage"] for event in seen[:-2]] == [None] * 3
    assert seen[-2]["choices"] == []
    assert seen[-2]["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def test_the_receipt_stands_in_the_last_object(a_shape: Shapes) -> None:
    for changes in ({}, {"has_usage_event": True}):
        writer = write_chat_completion(a_shape(**changes))
        seen = events(writer.finish(Finish.STOP, USAGE, b'{"attempts":1}'))
        assert seen[-2]["shoal_receipt"] == {"attempts": 1}
        assert not any("shoal_receipt" in event for event in seen[:-2])


def test_an_answer_without_tokens_still_has_a_role(a_shape: Shapes) -> None:
    seen = events(write_chat_completion(a_shape()).finish(Finish.STOP, USAGE, None))
    assert seen[0]["choices"][0]["delta"]["role"] == "assistant" and len(seen) == 3


def test_a_failure_is_an_error_event(a_shape: Shapes) -> None:
    writer = write_chat_completion(a_shape())
    writer.delta(Delta("a"))
    failure = ShownFailure("engine_failed", "The engine failed; try again.", is_callers=False)
    assert events(writer.fail(failure, b'{"attempts":3}')) == [
        {
            "error": {
                "message": "The engine failed; try again.",
                "type": "server_error",
                "param": None,
                "code": "engine_failed",
            },
            "shoal_receipt": {"attempts": 3},
        },
        "[DONE]",
    ]


def test_logprobs_have_openais_shape(a_shape: Shapes) -> None:
    writer = write_chat_completion(a_shape(has_logprobs=True))
    seen = events(writer.delta(Delta("é", [TOKEN])))
    entry = ChatCompletionChunk.model_validate(seen[1]).choices[0].logprobs
    assert entry is not None and entry.content is not None
    assert entry.content[0].bytes == [195] and entry.content[0].token == "\N{REPLACEMENT CHARACTER}"
    assert [(top.token, top.logprob) for top in entry.content[0].top_logprobs][1] == ("x", -9999.0)


def test_a_body_holds_the_whole_answer(a_shape: Shapes) -> None:
    writer = write_chat_completion(a_shape(is_stream=False, has_logprobs=True))
    assert writer.delta(Delta("Hel", [TOKEN])) + writer.delta(Delta("lo")) == b""
    body = json.loads(writer.finish(Finish.LENGTH, USAGE, None))
    parsed = ChatCompletion.model_validate(body)
    assert parsed.choices[0].message.content == "Hello" and parsed.choices[0].finish_reason == "length"
    assert parsed.usage is not None and parsed.usage.prompt_tokens_details is not None
    assert parsed.usage.prompt_tokens_details.cached_tokens == 8
    assert "shoal_receipt" not in body


def test_the_receipt_is_in_the_body_only_when_given(a_shape: Shapes) -> None:
    writer = write_chat_completion(a_shape(is_stream=False))
    assert json.loads(writer.finish(Finish.STOP, USAGE, b"{}"))["shoal_receipt"] == {}
