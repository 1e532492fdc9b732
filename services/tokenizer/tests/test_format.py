import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1 import common_pb2 as pb
from shoal_tokenizer.codec.api import AnswerEnd, AnswerShape, Api, Codec, Delta, Finish, ShownFailure
from shoal_tokenizer.encode import pack_state
from shoal_tokenizer.format import AnswerStreams, Ending, Opening, Piece, Turn, format_answer

Shapes = Callable[..., AnswerShape]


def opening(shape: AnswerShape, stream_id: int = 1, prior_ids: Sequence[int] = ()) -> Opening:
    return Opening(stream_id, pack_state(shape), prompt_tokens=10, hit_tokens=3, prior_ids=prior_ids)


def tokens(**ids_by_stream: Sequence[int]) -> dict[str, Any]:
    """Columns of a turn: ``tokens(s1=[..], s2=[..])``."""
    return {
        "stream_ids": [int(name[1:]) for name in ids_by_stream],
        "counts": [len(ids) for ids in ids_by_stream.values()],
        "token_ids": [token_id for ids in ids_by_stream.values() for token_id in ids],
    }


def content(raw: bytes) -> str:
    texts = []
    for line in raw.decode().split("\n\n"):
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            texts += [choice["delta"].get("content", "") for choice in event.get("choices", [])]
    return "".join(texts)


def only(pieces: list[Piece]) -> Piece:
    (piece,) = pieces
    return piece


def test_one_stream_from_open_to_close(codec: Codec, reference: Tokenizer, a_shape: Shapes) -> None:
    streams = AnswerStreams(codec)
    ids = reference.encode("the quick fox").ids
    first = only(streams.turn(Turn(opens=[opening(a_shape())], **tokens(s1=ids[:2]))))
    assert first.events.count(b"data: ") == 2  # the role, and one event for both tokens
    last = only(streams.turn(Turn(**tokens(s1=ids[2:]), endings=[Ending(1, Finish.STOP)])))
    assert content(first.events + last.events) == "the quick fox"
    assert last.events.endswith(b"data: [DONE]\n\n")
    assert (last.completion_tokens, last.finish, len(streams)) == (len(ids), Finish.STOP, 0)


def test_the_final_hit_replaces_the_one_told_at_open(codec: Codec, a_shape: Shapes) -> None:
    for told, expected in ((None, 3), (0, 0), (7, 7)):
        streams = AnswerStreams(codec)
        streams.turn(Turn(opens=[opening(a_shape(is_stream=False))]))
        piece = only(streams.turn(Turn(endings=[Ending(1, Finish.STOP, hit_tokens=told)])))
        assert json.loads(piece.events)["usage"]["prompt_tokens_details"]["cached_tokens"] == expected


def test_a_stop_string_is_told_once_and_decides_the_reason(codec: Codec, reference: Tokenizer, a_shape: Shapes) -> None:
    streams = AnswerStreams(codec)
    ids = reference.encode("the lazy dog, and").ids
    found = only(streams.turn(Turn(opens=[opening(a_shape(stop_strings=("dog",)))], **tokens(s1=ids))))
    assert (found.stop_string, content(found.events)) == ("dog", "the lazy ")
    assert streams.turn(Turn(**tokens(s1=ids))) == []
    last = only(streams.turn(Turn(endings=[Ending(1, Finish.CANCEL)])))
    assert b'"finish_reason":"stop"' in last.events and last.stop_string is None
    assert content(last.events) == ""


def test_withheld_text_comes_before_the_reason(codec: Codec, reference: Tokenizer, a_shape: Shapes) -> None:
    streams = AnswerStreams(codec)
    ids = reference.encode("the do").ids
    streams.turn(Turn(opens=[opening(a_shape(stop_strings=("dog",)))], **tokens(s1=ids)))
    last = only(streams.turn(Turn(endings=[Ending(1, Finish.LENGTH)])))
    assert content(last.events) == "do" and b'"finish_reason":"length"' in last.events


def test_a_cancelled_answer_ends_without_events(codec: Codec, a_shape: Shapes) -> None:
    streams = AnswerStreams(codec)
    streams.turn(Turn(opens=[opening(a_shape())], **tokens(s1=[65])))
    last = only(streams.turn(Turn(endings=[Ending(1, Finish.CANCEL)])))
    assert (last.events, last.completion_tokens) == (b"", 1)


def test_a_failed_answer_ends_with_an_error_event(codec: Codec, a_shape: Shapes) -> None:
    streams = AnswerStreams(codec)
    streams.turn(Turn(opens=[opening(a_shape())], **tokens(s1=[65])))
    failure = ShownFailure("engine_failed", "It failed.", is_callers=False)
    last = only(streams.turn(Turn(endings=[Ending(1, Finish.FAILURE, failure)])))
    assert b'"error":{"message":"It failed."' in last.events and last.finish is Finish.FAILURE


def test_unknown_closed_and_dropped_streams_are_passed_over(codec: Codec, a_shape: Shapes) -> None:
    streams = AnswerStreams(codec)
    turn = Turn(
        opens=[opening(a_shape(), 1), opening(a_shape(), 2)], **tokens(s9=[65, 66], s1=[67], s2=[68]), drops=[2]
    )
    assert [piece.stream_id for piece in streams.turn(turn)] == [1]
    assert streams.turn(Turn(**tokens(s2=[65]), endings=[Ending(9, Finish.STOP), Ending(2, Finish.STOP)])) == []
    assert len(streams) == 1


def test_columns_that_do_not_fit_break_the_connection(codec: Codec) -> None:
    for broken in (Turn(stream_ids=[1], counts=[]), Turn(stream_ids=[1], counts=[2], token_ids=[5])):
        with pytest.raises(BadRequest):
            AnswerStreams(codec).turn(broken)


@pytest.mark.parametrize("state", [b"", b"\x01", b"\x02\x90", b"\x01garbage", b"\x01\x90"])
def test_a_state_that_is_not_ours_fails_its_stream_only(codec: Codec, a_shape: Shapes, state: bytes) -> None:
    streams = AnswerStreams(codec)
    bad, good = streams.turn(Turn(opens=[Opening(1, state, 1, 0), opening(a_shape(), 2)], **tokens(s1=[65], s2=[66])))
    assert bad.error is not None and bad.error.code == pb.INVALID_REQUEST
    assert good.error is None and good.events


def test_a_state_of_another_model_is_refused(codec: Codec, a_shape: Shapes) -> None:
    piece = only(AnswerStreams(codec).turn(Turn(opens=[opening(a_shape(model="other"))])))
    assert piece.error is not None


def test_a_stream_number_cannot_be_used_twice(codec: Codec, a_shape: Shapes) -> None:
    streams = AnswerStreams(codec)
    streams.turn(Turn(opens=[opening(a_shape())]))
    piece = only(streams.turn(Turn(opens=[opening(a_shape())])))
    assert piece.error is not None and len(streams) == 0


def test_nothing_new_while_draining(codec: Codec, a_shape: Shapes) -> None:
    streams = AnswerStreams(codec)
    streams.turn(Turn(opens=[opening(a_shape(), 1)]))
    streams.is_draining = True
    refused, running = streams.turn(Turn(opens=[opening(a_shape(), 2)], **tokens(s1=[65])))
    assert refused.error is not None and refused.error.code == pb.DRAINING
    assert running.events


class BrokenWriter:
    def delta(self, delta: Delta) -> bytes:
        raise RuntimeError("broken on purpose")


@pytest.mark.logs_error("answer.crashed")
def test_a_crash_ends_its_own_answer_only(codec: Codec, a_shape: Shapes) -> None:
    def writer(shape: AnswerShape) -> Any:
        return BrokenWriter() if shape.response_id == "bad" else codec.writers[shape.api](shape)

    streams = AnswerStreams(replace(codec, writers={a_shape().api: writer}))
    opens = [opening(a_shape(response_id="bad"), 1), opening(a_shape(), 2)]
    bad, good = streams.turn(Turn(opens=opens, **tokens(s1=[65], s2=[66])))
    assert bad.error is not None and bad.error.code == pb.BUG and "purpose" not in bad.error.message
    assert good.events and len(streams) == 1


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, 405), min_size=1, max_size=30),
    at=st.integers(0, 30),
    stops=st.sampled_from([(), ("the",), ("a", "stop", "ö")]),
    has_logprobs=st.booleans(),
)
def test_a_stream_goes_on_elsewhere_where_it_was_lost(
    codec: Codec, a_shape: Shapes, ids: list[int], at: int, stops: tuple[str, ...], has_logprobs: bool
) -> None:
    shape = a_shape(stop_strings=stops, has_logprobs=has_logprobs)
    at = at % len(ids) + 1

    def said(*turns: Turn) -> list[bytes]:
        streams = AnswerStreams(codec)
        return [b"".join(piece.events for piece in streams.turn(turn)) for turn in turns]

    before, after = Turn(opens=[opening(shape)], **tokens(s1=ids[:at])), Turn(**tokens(s1=ids[at:]))
    end = Turn(endings=[Ending(1, Finish.LENGTH)])
    _, *rest = said(before, after, end)
    _, *resumed = said(Turn(opens=[opening(shape, prior_ids=ids[:at])]), after, end)
    assert resumed == rest


def test_events_tell_how_many_tokens_they_hold(codec: Codec, a_shape: Shapes) -> None:
    streams = AnswerStreams(codec)
    first = only(streams.turn(Turn(opens=[opening(a_shape(), prior_ids=[65, 66])], **tokens(s1=[67]))))
    last = only(streams.turn(Turn(**tokens(s1=[68, 69]), endings=[Ending(1, Finish.LENGTH)])))
    assert (first.parsed_tokens, last.parsed_tokens) == (3, 5)


def test_a_resumed_stream_does_not_open_again(codec: Codec, a_shape: Shapes) -> None:
    streams = AnswerStreams(codec)
    resumed = replace(opening(a_shape()), is_resumed=True)
    piece = only(streams.turn(Turn(opens=[resumed], **tokens(s1=[65]), endings=[Ending(1, Finish.STOP)])))
    assert b'"role"' not in piece.events and content(piece.events)


def test_an_answer_too_long_for_one_message_ends_alone(codec: Codec, a_shape: Shapes) -> None:
    streams = AnswerStreams(codec, max_event_bytes=500)
    opens = [opening(a_shape(is_stream=False), 1), opening(a_shape(is_stream=False), 2)]
    streams.turn(Turn(opens=opens, **tokens(s1=[65] * 500, s2=[65])))
    long, short = streams.turn(Turn(endings=[Ending(1, Finish.STOP), Ending(2, Finish.STOP)]))
    assert long.error is not None and not long.events
    assert short.error is None and short.events


def test_format_gives_what_converse_gives(codec: Codec, reference: Tokenizer, a_shape: Shapes) -> None:
    ids = reference.encode("the quick brown fox").ids
    for shape in (a_shape(), a_shape(is_stream=False)):
        whole = format_answer(codec, opening(shape, prior_ids=ids), (), Ending(0, Finish.STOP))
        streams = AnswerStreams(codec)
        turn = Turn(opens=[opening(shape)], **tokens(s1=ids), endings=[Ending(1, Finish.STOP)])
        assert whole.body == only(streams.turn(turn)).events
        assert (whole.completion_tokens, whole.is_stopped_early) == (len(ids), False)


def test_format_tells_that_a_stop_string_cut_the_answer(codec: Codec, reference: Tokenizer, a_shape: Shapes) -> None:
    ids = reference.encode("the quick brown fox").ids
    shape = a_shape(is_stream=False, stop_strings=("quick",))
    formatted = format_answer(codec, opening(shape, prior_ids=ids), (), Ending(0, Finish.LENGTH))
    assert formatted.is_stopped_early and formatted.completion_tokens < len(ids)
    assert json.loads(formatted.body)["choices"][0]["finish_reason"] == "stop"


def test_format_takes_complete_answers_only(codec: Codec, a_shape: Shapes) -> None:
    with pytest.raises(BadRequest):
        format_answer(codec, opening(a_shape()), (), Ending(0, Finish.CANCEL))


class NumberedEvents:
    """An ``EventWriter`` that numbers what it says."""

    def __init__(self, shape: AnswerShape) -> None:
        self.events = 0
        self.kept_body: bytes | None = None

    def open(self, prompt_tokens: int, hit_tokens: int) -> bytes:
        return self._say(f"open {prompt_tokens} {hit_tokens}")

    def delta(self, delta: Delta) -> bytes:
        return self._say(delta.text) if delta.text else b""

    def finish(self, end: AnswerEnd) -> bytes:
        self.kept_body = b"whole"
        return self._say(f"end {end.finish.value} {end.usage.completion_tokens}")

    def cancel(self) -> bytes:
        self.kept_body = b"cancelled"
        return self._say("cancelled")

    def fail(self, failure: ShownFailure, receipt_json: bytes | None) -> bytes:
        return self._say(failure.code)

    def _say(self, words: str) -> bytes:
        self.events += 1
        return f"{self.events - 1}:{words}|".encode()


@pytest.fixture
def numbered(codec: Codec) -> Codec:
    return replace(codec, writers={Api.CHAT_COMPLETIONS: NumberedEvents})


def test_a_resumed_answer_goes_on_numbering_where_the_client_is(
    numbered: Codec, reference: Tokenizer, a_shape: Shapes
) -> None:
    ids = reference.encode("the quick fox").ids
    one_by_one = AnswerStreams(numbered)
    pieces = [only(one_by_one.turn(Turn(opens=[opening(a_shape())], **tokens(s1=ids[:1]))))]
    pieces += [only(one_by_one.turn(Turn(**tokens(s1=[token_id])))) for token_id in ids[1:]]
    seen = sum(piece.event_count for piece in pieces)
    assert seen == 1 + len(ids)

    resumed = replace(opening(a_shape(), prior_ids=ids), is_resumed=True, prior_events=seen)
    last = only(AnswerStreams(numbered).turn(Turn(opens=[resumed], endings=[Ending(1, Finish.STOP)])))
    assert last.events.decode() == f"{seen}:end stop {len(ids)}|"
    assert last.event_count == 1


def test_what_is_to_be_kept_comes_with_the_end(numbered: Codec, a_shape: Shapes) -> None:
    for finish, kept in ((Finish.STOP, b"whole"), (Finish.CANCEL, b"cancelled")):
        turn = Turn(opens=[opening(a_shape())], endings=[Ending(1, finish)])
        assert only(AnswerStreams(numbered).turn(turn)).kept_body == kept
