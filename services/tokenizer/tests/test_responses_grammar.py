"""The grammar checker finds what is wrong with a stream."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from shoal_testkit.grammars.events import GrammarBroken, read_named
from shoal_testkit.grammars.responses import check_responses_stream
from shoal_tokenizer.codec.api import (
    AnswerEnd,
    CallArguments,
    CallBegin,
    CallEnd,
    Converted,
    Delta,
    Finish,
    Reasoning,
    RequestNames,
    Sampling,
    Text,
    Usage,
)
from shoal_tokenizer.codec.events.responses import write_response
from shoal_tokenizer.codec.requests.responses import ResponsesConverter
from shoal_tokenizer.codec.requests.served_model import ServedModel

Events = list[dict[str, Any]]


def a_stream() -> Events:
    body = b'{"model":"tiny","input":"Hi","stream":true}'
    converted = ResponsesConverter(ServedModel("tiny", Sampling(), 100)).convert(body, RequestNames("r1", 1))
    assert isinstance(converted, Converted)
    writer = write_response(converted.shape)
    parts = [Reasoning("t"), Text("a"), Text("b"), CallBegin("f"), CallArguments("{}"), CallEnd()]
    raw = writer.open(5, 4) + writer.delta(Delta(parts))
    return read_named(raw + writer.finish(AnswerEnd(Finish.STOP, Usage(5, 4, 3, 1))))


def written(events: Events) -> bytes:
    return b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)


def renumbered(events: Events) -> Events:
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def first(events: Events, kind: str) -> dict[str, Any]:
    return next(event for event in events if event["type"] == f"response.{kind}")


def _swap(events: Events) -> None:
    events[3], events[4] = events[4], events[3]


BREAKS: dict[str, Callable[[Events], object]] = {
    "no beginning": lambda events: events.pop(0),
    "no end": lambda events: events.pop(),
    "two ends": lambda events: events.append(dict(events[-1])),
    "wrong order": _swap,
    "a missing delta": lambda events: events.remove(first(events, "output_text.delta")),
    "a missing done": lambda events: events.remove(first(events, "output_text.done")),
    "a missing part": lambda events: events.remove(first(events, "content_part.added")),
    "a missing end of a part": lambda events: events.remove(first(events, "content_part.done")),
    "a missing end of an item": lambda events: events.remove(first(events, "output_item.done")),
    "another text": lambda events: first(events, "output_text.done").update(text="x"),
    "an empty delta": lambda events: first(events, "output_text.delta").update(delta=""),
    "other arguments": lambda events: first(events, "function_call_arguments.done").update(arguments="[]"),
    "another item": lambda events: first(events, "output_text.delta").update(item_id="msg_x"),
    "another index": lambda events: first(events, "output_text.delta").update(output_index=7),
    "another part": lambda events: first(events, "output_text.delta").update(content_index=1),
    "an unknown event": lambda events: first(events, "output_text.delta").update(type="response.magic"),
    "an item of another kind": lambda events: first(events, "output_item.added")["item"].update(type="magic"),
    "an item with content": lambda events: first(events, "output_item.added")["item"].update(content=["x"]),
    "another final text": lambda events: events[-1]["response"]["output"][1]["content"][0].update(text="x"),
    "a lost item": lambda events: events[-1]["response"]["output"].pop(),
    "another response": lambda events: events[-1]["response"].update(id="resp_x"),
    "another status": lambda events: events[-1]["response"].update(status="failed"),
    "no usage": lambda events: events[-1]["response"].update(usage=None),
    "a wrong total": lambda events: events[-1]["response"]["usage"].update(total_tokens=9),
    "too many cached": lambda events: events[-1]["response"]["usage"]["input_tokens_details"].update(cached_tokens=6),
    "an error without failure": lambda events: events[-1]["response"].update(error={"code": "x"}),
}


def test_a_right_stream_gives_its_final_object() -> None:
    events = a_stream()
    raw = b": keep-alive\n\n" + written(events)
    assert check_responses_stream(raw) == events[-1]["response"]


@pytest.mark.parametrize("name", BREAKS)
def test_each_break_is_found(name: str) -> None:
    events = a_stream()
    BREAKS[name](events)
    with pytest.raises(GrammarBroken):
        check_responses_stream(written(renumbered(events)))


def test_a_gap_in_the_numbers_is_found() -> None:
    events = a_stream()
    events[4]["sequence_number"] += 1
    with pytest.raises(GrammarBroken, match="has the number 5, not 4"):
        check_responses_stream(written(events))


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"data: [DONE]\n\n",
        lambda raw: raw.replace(b"event: response.created", b"event: response.magic"),
        lambda raw: raw.replace(b"event: response.created\n", b""),
        lambda raw: raw.replace(b'"total_tokens": 8', b'"total_tokens": NaN'),
    ],
)
def test_broken_bytes_are_found(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(GrammarBroken):
        check_responses_stream(change(written(a_stream())))
