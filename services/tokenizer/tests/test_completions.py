"""Completions: the request, and the answer."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1 import common_pb2 as pb
from shoal_tokenizer.codec.api import (
    AnswerEnd,
    AnswerShape,
    Api,
    Converted,
    Delta,
    Finish,
    Reasoning,
    RequestNames,
    Sampling,
    ShownFailure,
    ShownToken,
    Text,
    Usage,
)
from shoal_tokenizer.codec.conversation import RawText
from shoal_tokenizer.codec.events.completions import write_completion
from shoal_tokenizer.codec.requests.completions import CompletionsConverter, Request
from shoal_tokenizer.codec.requests.served_model import ServedModel

CONVERTER = CompletionsConverter(ServedModel("tiny", Sampling(temperature=0.6, stop_token_ids=[2]), 100))
END = AnswerEnd(Finish.STOP, Usage(10, 8, 2))


def convert_raw(body: bytes) -> Converted:
    return CONVERTER.convert(body, RequestNames("r1", 1700000000))


def convert(**fields: Any) -> Converted:
    return convert_raw(json.dumps({"model": "tiny", "prompt": "Once"} | fields).encode())


def test_the_smallest_request() -> None:
    converted = convert()
    assert converted.prompt == RawText("Once")
    assert converted.sampling == Sampling(max_tokens=16, temperature=0.6, stop_token_ids=[2])
    assert converted.shape == AnswerShape(Api.COMPLETIONS, "cmpl-r1", 1700000000, "tiny", False)
    assert not converted.is_agent and converted.notes == ()


def test_every_field_is_taken() -> None:
    converted = convert(
        prompt=["Once"], max_tokens=7, temperature=0, top_p=0.5, seed=3, presence_penalty=1, frequency_penalty=-1,
        logit_bias={"5": 1}, logprobs=2, stop=["a", "b"], stream=True, stream_options={"include_usage": True},
        n=3, best_of=3, echo=False, suffix=None, user="u",
    )  # fmt: skip
    assert converted.prompt == RawText("Once")
    assert converted.sampling == Sampling(
        max_tokens=7, temperature=0, top_p=0.5, seed=3, presence_penalty=1, frequency_penalty=-1, logit_bias={5: 1},
        logprobs=2, stop_token_ids=[2],
    )  # fmt: skip
    shape = converted.shape
    assert (shape.stop_strings, shape.is_stream, shape.has_usage_event) == (("a", "b"), True, True)
    assert (shape.has_logprobs, shape.top_logprobs) == (True, 2)
    assert convert(logprobs=0).sampling.logprobs == 0
    assert converted.choices == 3 and convert().choices == 1


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": [1, 2]}, pb.UNSUPPORTED, "prompt"),
        ({"prompt": [[1, 2], [3]]}, pb.UNSUPPORTED, "prompt"),
        ({"prompt": ["a", "b"]}, pb.UNSUPPORTED, "prompt"),
        ({"echo": True}, pb.UNSUPPORTED, "echo"),
        ({"suffix": "x"}, pb.UNSUPPORTED, "suffix"),
        ({"best_of": 2}, pb.UNSUPPORTED, "best_of"),
        ({"n": 9}, pb.UNSUPPORTED, "n"),
        ({"n": 2, "best_of": 1}, pb.UNSUPPORTED, "best_of"),
        ({"prompt": ""}, pb.INVALID_REQUEST, "prompt"),
        ({"prompt": []}, pb.INVALID_REQUEST, "prompt"),
        ({"prompt": [{}]}, pb.INVALID_REQUEST, "prompt"),
        ({"prompt": None}, pb.INVALID_REQUEST, "prompt"),
        ({"logprobs": 6}, pb.INVALID_REQUEST, "logprobs"),
        ({"logprobs": True}, pb.INVALID_REQUEST, "logprobs"),
        ({"max_tokens": 0}, pb.INVALID_REQUEST, "max_tokens"),
        ({"messages": []}, pb.INVALID_REQUEST, "messages"),
        ({"stream_options": {}}, pb.INVALID_REQUEST, "stream_options"),
        ({"model": "other"}, pb.MODEL_NOT_FOUND, "model"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], code: int, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        convert(**fields)
    assert (caught.value.code, caught.value.param) == (code, param)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(Request.__struct_fields__), ANYTHING, max_size=3), ANYTHING | st.binary())
def test_any_body_is_converted_or_refused(fields: dict[str, Any], prompt: Any) -> None:
    is_bytes = isinstance(prompt, bytes)
    raw = prompt if is_bytes else json.dumps({"model": "tiny", "prompt": prompt} | fields).encode()
    try:
        assert isinstance(convert_raw(raw), Converted)
    except BadRequest as refused:
        assert len(refused.message) < 400


def events(raw: bytes) -> list[Any]:
    parts = raw.split(b"\n\n")
    assert parts.pop() == b"" and parts.pop() == b"data: [DONE]"
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


def shape(**changes: Any) -> AnswerShape:
    fields: dict[str, Any] = {"is_stream": True} | changes
    return AnswerShape(Api.COMPLETIONS, "cmpl-1", 1700000000, "tiny", **fields)


TOKENS = [
    ShownToken(b" a", -0.5, [(b" a", -0.5), (b"x", float("-inf"))]),
    ShownToken("é".encode()[:1], -0.1, []),
    ShownToken("é".encode()[1:], -0.2, []),
    ShownToken(b"!", -0.3, [(b"?", -0.2)]),
]
LOGPROBS = {
    "tokens": [" a", "\ufffd", "\ufffd", "!"],
    "token_logprobs": [-0.5, -0.1, -0.2, -0.3],
    "top_logprobs": [{" a": -0.5, "x": -9999.0}, {"\ufffd": -0.1}, {"\ufffd": -0.2}, {"?": -0.2, "!": -0.3}],
    "text_offset": [0, 2, 2, 3],
}


def test_a_stream_is_texts_reason_usage_done() -> None:
    writer = write_completion(shape(has_usage_event=True))
    deltas = [Delta([Text('"a\n')]), Delta(), Delta([Reasoning("b"), Text("c")])]
    raw = writer.open(10, 8) + b"".join(map(writer.delta, deltas)) + writer.finish(END)
    seen = events(raw)
    for event in seen:
        Completion.model_validate(event | {"choices": []}, strict=True)
        assert {choice["finish_reason"] for choice in event["choices"]} <= {None, "stop"}
    assert [choice["text"] for event in seen for choice in event["choices"]] == ['"a\n', "bc", ""]
    assert [choice["finish_reason"] for event in seen for choice in event["choices"]] == [None, None, "stop"]
    assert all(event["usage"] is None for event in seen[:-1]) and seen[-1]["usage"]["total_tokens"] == 12
    assert writer.events == len(seen) and {event["id"] for event in seen} == {"cmpl-1"}


def test_a_body_is_the_whole_text() -> None:
    writer = write_completion(shape(is_stream=False, has_logprobs=True))
    assert writer.open(10, 8) + writer.delta(Delta([Text(" aé")], TOKENS[:3])) == b""
    writer.delta(Delta([Text("!")], TOKENS[3:]))
    end = AnswerEnd(Finish.LENGTH, END.usage, receipt_json=b'{"n":1}')
    answer = json.loads(writer.finish(end))
    parsed = Completion.model_validate(answer, strict=True)
    assert (parsed.choices[0].text, parsed.choices[0].finish_reason) == (" aé!", "length")
    assert answer["choices"][0]["logprobs"] == LOGPROBS and answer["shoal_receipt"] == {"n": 1}
    assert parsed.usage is not None and parsed.usage.completion_tokens == 2


def test_offsets_go_on_over_events() -> None:
    writer = write_completion(shape(has_logprobs=True))
    raw = b"".join(writer.delta(Delta([Text(text)] if text else [], [token])) for text, token in zip(
        (" a", "", "é", "!"), TOKENS, strict=True
    ))  # fmt: skip
    seen = events(raw + writer.finish(END))
    offsets = [choice["logprobs"]["text_offset"] for event in seen[:-1] for choice in event["choices"]]
    assert offsets == [[0], [2], [2], [3]]


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_failure_is_an_error(is_stream: bool) -> None:
    writer = write_completion(shape(is_stream=is_stream))
    raw = writer.fail(ShownFailure("overloaded", "Try again.", is_callers=False), None)
    (told,) = events(raw) if is_stream else [json.loads(raw)]
    assert told == {"error": {"message": "Try again.", "type": "server_error", "param": None, "code": "overloaded"}}
    assert writer.cancel() == b"" and writer.kept_body is None
