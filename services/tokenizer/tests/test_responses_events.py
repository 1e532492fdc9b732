"""What Responses clients get. Every stream goes through the grammar checker and through the SDK's own types."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from shoal_testkit.grammars.events import read_named
from shoal_testkit.grammars.responses import check_responses_stream
from shoal_tokenizer.codec.api import (
    AnswerEnd,
    AnswerShape,
    CallArguments,
    CallBegin,
    CallEnd,
    Converted,
    Delta,
    Finish,
    Part,
    Reasoning,
    RequestNames,
    Sampling,
    ShownFailure,
    ShownToken,
    Text,
    Usage,
)
from shoal_tokenizer.codec.conversation import Conversation
from shoal_tokenizer.codec.events.responses import write_response
from shoal_tokenizer.codec.requests.responses import ResponsesConverter
from shoal_tokenizer.codec.requests.served_model import ServedModel

CONVERTER = ResponsesConverter(ServedModel("tiny", Sampling(), 100))
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = Usage(prompt_tokens=40, hit_tokens=32, completion_tokens=12, reasoning_tokens=5)
STOPPED = AnswerEnd(Finish.STOP, USAGE)
FAILURE = ShownFailure("engine_failed", "The engine failed. Ask again.", is_callers=False)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "patch"},
    {
        "type": "namespace",
        "name": "notes",
        "description": "Notes.",
        "tools": [{"type": "function", "name": "search", "parameters": {"type": "object"}}],
    },
]
THOUGHT: list[Part] = [Reasoning("Hm"), Reasoning("m.\n 😀")]
CALL: list[Part] = [CallBegin("f"), CallArguments('{"a"'), CallArguments(": 1}"), CallEnd()]
EVERYTHING: list[Part] = [
    *THOUGHT,
    Text("I "),
    Text("look."),
    *CALL,
    CallBegin("notes::search"),
    CallArguments("{}"),
    CallEnd(),
    CallBegin("patch"),
    CallArguments('{"input": "*** B\\n+ \\u00'),
    CallArguments('fc \\"x\\" \\ud83d'),
    CallArguments('\\ude00"}'),
    CallEnd(),
    Text("Done."),
]


def convert(**fields: Any) -> Converted:
    body = {"model": "tiny", "input": "Hi", "tools": TOOLS, "stream": True, **fields}
    converted = CONVERTER.convert(json.dumps(body).encode(), RequestNames("r1", 1_790_000_000, b"[]"))
    assert isinstance(converted, Converted)
    return converted


def shape_of(**fields: Any) -> AnswerShape:
    # As it arrives at the instance that writes: through the output state.
    packed = msgspec.msgpack.encode(convert(**fields).shape)
    return msgspec.msgpack.decode(packed, type=AnswerShape)


def said(shape: AnswerShape, parts: Sequence[Part], end: AnswerEnd = STOPPED) -> bytes:
    writer = write_response(shape)
    pieces = [writer.open(USAGE.prompt_tokens, 0), *(writer.delta(Delta([part])) for part in parts)]
    return b"".join([*pieces, writer.finish(end)])


def checked(raw: bytes) -> dict[str, Any]:
    """The final object of a stream that both the grammar and the SDK take."""
    for event in read_named(raw):
        EVENT.validate_python(event, strict=False)
    final = check_responses_stream(raw)
    Response.model_validate(final)
    return final


def types(raw: bytes) -> list[str]:
    return [event["type"].removeprefix("response.") for event in read_named(raw)]


def test_an_answer_of_every_kind_of_item() -> None:
    raw = said(shape_of(), EVERYTHING)
    final = checked(raw)
    reasoning, message, call, search, patch, last = final["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hmm.\n 😀"}] and reasoning["summary"] == []
    assert message["content"][0]["text"] == "I look." and last["content"][0]["text"] == "Done."
    assert (call["name"], call["arguments"], call["call_id"]) == ("f", '{"a": 1}', "call_r1_2")
    assert (search["name"], search["namespace"], search["arguments"]) == ("search", "notes", "{}")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", '*** B\n+ ü "x" 😀')
    assert [item["id"] for item in final["output"]] == [
        "rs_r1_0",
        "msg_r1_1",
        "fc_r1_2",
        "fc_r1_3",
        "ctc_r1_4",
        "msg_r1_5",
    ]
    assert final["status"] == "completed" and final["id"] == "resp_r1"


def test_the_events_of_text_in_their_order() -> None:
    raw = said(shape_of(), [Text("a"), Text("b")])
    assert types(raw) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert b"[DONE]" not in raw
    checked(raw)


def test_what_is_told_does_not_depend_on_how_parts_were_batched() -> None:
    shape = shape_of()
    writer = write_response(shape)
    raw = writer.open(1, 0) + writer.delta(Delta(EVERYTHING)) + writer.finish(STOPPED)
    assert raw == said(shape, EVERYTHING)
    assert writer.events == len(read_named(raw))


def test_usage_is_what_was_counted() -> None:
    assert checked(said(shape_of(), [Text("a")]))["usage"] == {
        "input_tokens": 40,
        "input_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 0},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 5},
        "total_tokens": 52,
    }


@pytest.mark.parametrize(
    "parts", [[Text("cut")], THOUGHT, [*THOUGHT, *CALL[:2]], [CallBegin("patch"), CallArguments('{"input": "***')]]
)
def test_a_cut_answer_is_incomplete_and_so_is_its_last_item(parts: list[Part]) -> None:
    final = checked(said(shape_of(), parts, AnswerEnd(Finish.LENGTH, USAGE)))
    assert final["status"] == "incomplete" and final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["output"][-1]["status"] == "incomplete"


def test_items_before_the_cut_one_are_whole() -> None:
    final = checked(said(shape_of(), [*THOUGHT, *CALL, Text("x")], AnswerEnd(Finish.LENGTH, USAGE)))
    assert [item["status"] for item in final["output"]] == ["completed", "completed", "incomplete"]


def test_a_call_that_was_not_ended_is_incomplete_in_a_whole_answer() -> None:
    final = checked(said(shape_of(), CALL[:2]))
    assert (final["status"], final["output"][0]["status"]) == ("completed", "incomplete")


def test_an_answer_of_nothing() -> None:
    raw = said(shape_of(), [])
    assert types(raw) == ["created", "in_progress", "completed"] and checked(raw)["output"] == []


def test_a_failure_in_the_middle_ends_the_stream_and_shows_how_far_it_came() -> None:
    writer = write_response(shape_of())
    raw = writer.open(1, 0) + writer.delta(Delta([*CALL, Text("half")])) + writer.fail(FAILURE, b'{"attempts":2}')
    final = checked(raw)
    assert types(raw)[-1] == "failed" and types(raw)[-2] == "output_text.delta"
    assert [item["status"] for item in final["output"]] == ["completed", "incomplete"]
    assert final["error"] == {
        "code": "server_error",
        "message": FAILURE.message,
        "param": None,
        "type": "engine_failed",
    }
    assert read_named(raw)[-1]["shoal_receipt"] == {"attempts": 2}


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (FAILURE, "server_error"),
        (ShownFailure("overloaded", "Later.", is_callers=False), "rate_limit_exceeded"),
        (ShownFailure("unsupported", "No.", is_callers=True, param="tools"), "invalid_prompt"),
    ],
)
def test_a_failure_before_anything_is_a_whole_stream(failure: ShownFailure, code: str) -> None:
    raw = write_response(shape_of()).fail(failure, None)
    assert types(raw) == ["created", "in_progress", "failed"]
    assert checked(raw)["error"]["code"] == code


def test_the_body_is_the_final_object_of_the_stream() -> None:
    body = said(shape_of(stream=False), EVERYTHING)
    final = checked(said(shape_of(), EVERYTHING))
    assert json.loads(body) == final
    assert Response.model_validate_json(body).output_text == "I look.Done."


def test_the_receipt_stands_in_the_last_object_and_is_not_kept() -> None:
    end = AnswerEnd(Finish.STOP, USAGE, receipt_json=b'{"hit_tokens":32}')
    assert read_named(said(shape_of(), [Text("a")], end))[-1]["shoal_receipt"] == {"hit_tokens": 32}
    writer = write_response(shape_of(stream=False))
    writer.delta(Delta([Text("a")]))
    body = json.loads(writer.finish(end))
    assert body.pop("shoal_receipt") == {"hit_tokens": 32}
    assert writer.kept_body is not None and json.loads(writer.kept_body) == body


def test_a_failed_body_is_an_error_and_what_is_kept_says_failed() -> None:
    writer = write_response(shape_of(stream=False, background=True))
    writer.delta(Delta([Text("half")]))
    error = json.loads(writer.fail(FAILURE, None))["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_failed")
    assert writer.kept_body is not None
    kept = json.loads(writer.kept_body)
    Response.model_validate(kept)
    assert (kept["status"], kept["output"][0]["content"][0]["text"]) == ("failed", "half")


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_the_final_object_is_kept_when_it_is_stored(stream: bool, store: bool) -> None:
    writer = write_response(shape_of(stream=stream, store=store))
    writer.open(1, 0)
    writer.delta(Delta(EVERYTHING))
    last = writer.finish(STOPPED)
    if not store:
        assert writer.kept_body is None
        return
    assert writer.kept_body is not None
    final = read_named(last)[-1]["response"] if stream else json.loads(last)
    assert json.loads(writer.kept_body) == final


def test_an_answer_that_is_cancelled_before_its_first_token_begins_and_ends() -> None:
    writer = write_response(shape_of(background=True))
    raw = writer.cancel()
    assert types(raw)[0] == "created" and types(raw)[-1] == "incomplete"
    assert checked(raw)["status"] == "cancelled"


def test_a_cancelled_background_answer_is_kept_and_its_stream_ends() -> None:
    writer = write_response(shape_of(background=True))
    raw = writer.open(1, 0) + writer.delta(Delta([Text("half")])) + writer.cancel()
    final = checked(raw)
    assert types(raw)[-1] == "incomplete" and final["status"] == "cancelled"
    assert writer.kept_body is not None and json.loads(writer.kept_body) == final


def test_who_left_hears_nothing() -> None:
    writer = write_response(shape_of())
    writer.open(1, 0)
    assert writer.cancel() == b"" and writer.kept_body is not None
    quiet = write_response(shape_of(background=True, stream=False))
    assert quiet.cancel() == b"" and quiet.kept_body is not None


@pytest.mark.parametrize("told", range(len(EVERYTHING) + 1))
def test_another_instance_goes_on_with_the_numbers_and_ids(told: int) -> None:
    shape = shape_of()
    first = write_response(shape)
    begin = first.open(1, 0) + b"".join(first.delta(Delta([part])) for part in EVERYTHING[:told])
    second = write_response(shape)
    second.open(1, 0)
    second.delta(Delta(EVERYTHING[:told]))
    second.events = first.events
    rest = b"".join(second.delta(Delta([part])) for part in EVERYTHING[told:]) + second.finish(STOPPED)
    assert begin + rest == said(shape, EVERYTHING)


def test_carried_reasoning_is_only_there_when_asked_for() -> None:
    assert "encrypted_content" not in checked(said(shape_of(), THOUGHT))["output"][0]
    carried = checked(said(shape_of(include=["reasoning.encrypted_content"]), THOUGHT))["output"][0]
    assert carried["encrypted_content"] and "Hmm" not in carried["encrypted_content"]


def _token(text: str) -> ShownToken:
    return ShownToken(text.encode(), -0.5, [(text.encode(), -0.5), (b"\xff", float("-inf"))])


def test_log_probabilities_are_those_of_the_text() -> None:
    writer = write_response(shape_of(include=["message.output_text.logprobs"], top_logprobs=2))
    raw = writer.open(1, 0) + writer.delta(Delta([Reasoning("x"), Text("ab")], [_token("a"), _token("b")]))
    raw += writer.delta(Delta([], [_token("held")])) + writer.delta(Delta([Text("c")], [_token("c")]))
    final = checked(raw + writer.finish(STOPPED))
    (part,) = final["output"][1]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["a", "b", "held", "c"]
    assert part["logprobs"][0]["top_logprobs"][1] == {"token": "�", "logprob": -9999.0, "bytes": [255]}


def test_tokens_whose_text_comes_later_wait_for_it() -> None:
    writer = write_response(shape_of(include=["message.output_text.logprobs"]))
    raw = writer.open(1, 0) + writer.delta(Delta([], [_token("a")])) + writer.delta(Delta([Text("a")], []))
    final = checked(raw + writer.finish(STOPPED))
    assert [entry["token"] for entry in final["output"][0]["content"][0]["logprobs"]] == ["a"]


def test_the_response_repeats_the_request() -> None:
    asked: dict[str, Any] = {
        "instructions": "Be kind. 😀",
        "metadata": {"a": "b"},
        "max_output_tokens": 99,
        "temperature": 0.5,
        "top_p": 0.25,
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "user": "someone",
        "safety_identifier": "x",
        "prompt_cache_key": "k",
        "previous_response_id": "resp_0",
    }
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    final = checked(
        said(shape_of(**asked, text={"format": schema}, reasoning={"effort": "low"}, truncation="auto"), [Text("a")])
    )
    assert {name: final[name] for name in asked} == asked
    assert final["text"] == {"format": schema, "verbosity": "medium"} and final["tools"] == TOOLS
    assert (final["reasoning"]["effort"], final["truncation"], final["store"]) == ("low", "disabled", True)
    parsed = Response.model_validate(final)
    assert parsed.model_fields_set >= {n for n, f in Response.model_fields.items() if f.is_required()}


def test_output_items_can_be_sent_back_as_they_are() -> None:
    shape = shape_of(include=["reasoning.encrypted_content"])
    output = checked(said(shape, EVERYTHING[:-1]))["output"]
    calls = [item for item in output if "call_id" in item]
    results = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": f"out {n}"}
        for n, item in enumerate(calls)
    ]
    bodies = [
        output,
        [{k: v for k, v in item.items() if item["type"] != "reasoning" or k != "content"} for item in output],
    ]
    for items in bodies:  # with the readable reasoning, and as Codex passes it back
        prompt = convert(input=[{"role": "user", "content": "Hi"}, *items, *results]).prompt
        assert isinstance(prompt, Conversation)
        _user, answer, *outputs = prompt.messages
        assert answer == {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hmm.\n 😀",
            "tool_calls": [
                _call("call_r1_2", "f", {"a": 1}),
                _call("call_r1_3", "notes::search", {}),
                _call("call_r1_4", "patch", {"input": '*** B\n+ ü "x" 😀'}),
            ],
        }
        assert [message["content"] for message in outputs] == ["out 0", "out 1", "out 2"]


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
