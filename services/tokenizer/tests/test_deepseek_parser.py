"""Generated ids -> parts: vectors first, then what must hold for any tokens."""

import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shoal_testkit.deepseek_answers import DeepseekAnswers, segments
from shoal_tokenizer.codec.api import (
    AnswerShape,
    AnswerStart,
    CallArguments,
    CallBegin,
    CallEnd,
    Codec,
    Delta,
    Part,
    Reasoning,
    ShownToken,
    Text,
    TokenLogprob,
)

Shapes = Callable[..., AnswerShape]
PROPERTIES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
END_OF_TURN = 1
HALF = [b"\xf0\x9f", b"\xe4\xbd", b"\x80", b"\xff"]


class Answers:
    """Writes and reads answers of one model."""

    def __init__(self, codec: Codec, a_shape: Shapes) -> None:
        self.codec = codec
        self._a_shape = a_shape
        answers = DeepseekAnswers(codec.model == "v4")
        self.invoke, self.block = answers.invoke, answers.block

    def ids(self, text: str) -> list[int]:
        """Where marks stand they are tokens, as a model writes them."""
        return self.codec.encoder.encode(segments(text))

    def read(self, ids: Sequence[int], sizes: Sequence[int] = (1,), **shape: Any) -> "Answer":
        parser = self.codec.new_parser(self._a_shape(**{"has_tools": True, **shape}))
        deltas, at, turn = [], 0, 0
        while at < len(ids):
            size = sizes[turn % len(sizes)]
            logprobs = [TokenLogprob(-float(n), (), ()) for n in range(at, at + size)]
            deltas.append(parser.push(ids[at : at + size], logprobs))
            at, turn = at + size, turn + 1
        deltas.append(parser.close())
        assert parser.close() == Delta()
        return Answer(deltas, parser.stop_string, parser.completion_tokens, parser.reasoning_tokens)


class Answer:
    def __init__(self, deltas: Sequence[Delta], stop_string: str | None, tokens: int, reasoning: int) -> None:
        self.parts: list[Part] = []
        self.tokens: list[ShownToken] = []
        for delta in deltas:
            self.tokens += delta.tokens
            for part in delta.parts:
                self._add(part)
        self.stop_string = stop_string
        self.completion_tokens = tokens
        self.reasoning_tokens = reasoning

    def _add(self, part: Part) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(part, Text | Reasoning | CallArguments) and type(last) is type(part):
            self.parts[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr]
        else:
            self.parts.append(part)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Text))


@pytest.fixture(scope="session")
def answers(deepseek: Codec, a_shape: Shapes) -> Answers:
    return Answers(deepseek, a_shape)


SIZES = pytest.mark.parametrize("sizes", [(1,), (3,), (1000,)])


@SIZES
def test_reasoning_text_and_calls(answers: Answers, sizes: Sequence[int]) -> None:
    calls = answers.block(
        answers.invoke("look", ("city", "true", 'Zü"rich'), ("n", "false", "[3, 4]")), answers.invoke("g")
    )
    answer = answers.read(answers.ids(f"Hm, so.</think>Hi 你好 😀!{calls}"), sizes, start=AnswerStart.REASONING)
    assert answer.parts == [
        Reasoning("Hm, so."),
        Text("Hi 你好 😀!"),
        CallBegin("look"),
        CallArguments('{"city": "Zü\\"rich", "n": [3, 4]}'),
        CallEnd(),
        CallBegin("g"),
        CallArguments("{}"),
        CallEnd(),
    ]
    assert answer.reasoning_tokens == len(answers.ids("Hm, so."))
    assert answer.completion_tokens == len(answers.ids(f"Hm, so.</think>Hi 你好 😀!{calls}"))


def test_a_call_ends_before_the_answer_does(answers: Answers, a_shape: Shapes) -> None:
    parser = answers.codec.new_parser(a_shape(has_tools=True))
    delta = parser.push(answers.ids(answers.block(answers.invoke("f", ("a", "true", "x")))), ())
    assert delta.parts[-1] == CallEnd()


def test_a_block_that_the_prompt_opened(answers: Answers) -> None:
    rest = answers.block(answers.invoke("f", ("a", "false", "1"))).split(">\n", 1)[1]
    answer = answers.read(answers.ids(rest), start=AnswerStart.CALLS)
    assert answer.parts == [CallBegin("f"), CallArguments('{"a": 1}'), CallEnd()]


def test_without_tools_a_call_is_text(answers: Answers) -> None:
    text = f"Hi{answers.block(answers.invoke('f'))}"
    assert answers.read(answers.ids(text), has_tools=False).parts == [Text(text)]


def test_marks_in_other_tokens_are_text(answers: Answers) -> None:
    text = f"Hm </think> {answers.block(answers.invoke('f'))}"
    spelled = answers.codec.encoder.encode([(text, False)])
    assert answers.read(spelled, start=AnswerStart.REASONING).parts == [Reasoning(text)]
    assert answers.read(spelled).parts == [Text(text)]


def test_newlines_stay_where_the_prompt_ends(answers: Answers) -> None:
    assert answers.read(answers.ids("\n\nHm</think>A"), start=AnswerStart.REASONING).parts[0] == Reasoning("\n\nHm")
    assert answers.read(answers.ids("\n\nHi")).parts == [Text("\n\nHi")]


def test_the_end_of_the_turn_and_unknown_ids_say_nothing(answers: Answers) -> None:
    ids = [*answers.ids("Hi"), END_OF_TURN, 129_279 + 500, *answers.ids(" there"), END_OF_TURN]
    answer = answers.read(ids)
    assert answer.parts == [Text("Hi there")] and answer.completion_tokens == len(ids)


@pytest.mark.parametrize("text", ["", "Hi", "Hm</think>", "Hm"])
def test_short_answers(answers: Answers, text: str) -> None:
    answer = answers.read(answers.ids(text), start=AnswerStart.REASONING)
    assert answer.parts == ([Reasoning(text.removesuffix("</think>"))] if text else [])


@SIZES
def test_a_stop_string_ends_the_text_and_is_told(answers: Answers, sizes: Sequence[int]) -> None:
    ids = answers.ids("Here stop</think>Go there, stop here. More text")
    answer = answers.read(ids, sizes, start=AnswerStart.REASONING, stop_strings=("op h", "text"), has_logprobs=True)
    assert answer.parts == [Reasoning("Here stop"), Text("Go there, st")]
    assert answer.stop_string == "op h"
    assert b"".join(token.spelling for token in answer.tokens) == b"Go there, stop"
    assert answer.completion_tokens == len(answers.ids("Here stop</think>Go there, stop here"))
    assert answer.reasoning_tokens == len(answers.ids("Here stop"))


def test_withheld_text_comes_when_it_is_no_stop_string(answers: Answers) -> None:
    calls = answers.block(answers.invoke("f"))
    parts = answers.read(answers.ids(f"Hi sto{calls}"), stop_strings=("stop",)).parts
    assert parts == [Text("Hi sto"), CallBegin("f"), CallArguments("{}"), CallEnd()]
    assert answers.read(answers.ids("Hi sto"), stop_strings=("stop",)).parts == [Text("Hi sto")]


@SIZES
def test_tokens_of_the_text_are_shown_with_their_log_probabilities(answers: Answers, sizes: Sequence[int]) -> None:
    before = answers.ids("Hm</think>")
    text = answers.ids("Hi 你好 😀!")
    answer = answers.read([*before, *text], sizes, start=AnswerStart.REASONING, has_logprobs=True)
    assert b"".join(token.spelling for token in answer.tokens).decode() == answer.text == "Hi 你好 😀!"
    assert [token.logprob for token in answer.tokens] == [-float(len(before) + n) for n in range(len(text))]


def test_a_character_that_the_end_cut_off_is_dropped_but_counted(answers: Answers) -> None:
    ids = answers.ids("Hi 😀")
    answer = answers.read(ids[:-1], has_logprobs=True)
    assert answer.text == "Hi " and answer.completion_tokens == len(ids) - 1


def half_characters(codec: Codec, a_shape: Shapes) -> list[int]:
    """Ids of these bytes; the tokenizer has a token for each byte."""
    spelled = codec.new_parser(a_shape())._model.vocabulary.spelled  # type: ignore[attr-defined]
    return [spelled.index(half[i : i + 1]) for half in HALF for i in range(len(half))]


def test_thousands_of_half_characters_are_no_work(answers: Answers, a_shape: Shapes) -> None:
    halves = half_characters(answers.codec, a_shape)
    parser = answers.codec.new_parser(a_shape())
    begin_s = time.process_time()
    shown = 0
    for n in range(5000):
        shown += len(parser.push((halves[n % len(halves)],), ()).text)
        assert n < 8 or shown > n // 3  # nothing piles up
    parser.close()
    assert time.process_time() - begin_s < 1
    assert parser.completion_tokens == 5000


def test_what_is_malformed_in_a_call_becomes_a_text(answers: Answers) -> None:
    broken = answers.invoke("f", ("n", "false", "three"), ("b", "true", "x"))
    parts = answers.read(answers.ids(answers.block(broken, answers.invoke("g")))).parts
    assert [part for part in parts if not isinstance(part, CallArguments)] == [
        CallBegin("f"),
        CallEnd(),
        CallBegin("g"),
        CallEnd(),
    ]
    arguments = [json.loads(part.text) for part in parts if isinstance(part, CallArguments)]
    assert arguments[0]["n"].startswith("three") and arguments[1] == {}


def test_a_value_that_ends_within_its_json_still_makes_an_object(answers: Answers) -> None:
    parts = answers.read(answers.ids(answers.block(answers.invoke("f", ("n", "false", '{"My'))))).parts
    assert parts == [CallBegin("f"), CallArguments('{"n": {"My}": null}}'), CallEnd()]


def test_a_call_that_was_cut_has_no_end(answers: Answers) -> None:
    whole = answers.ids(answers.block(answers.invoke("f", ("n", "false", "[1, 2]"))))
    parts = answers.read(whole[:-16]).parts
    assert parts[0] == CallBegin("f") and CallEnd() not in parts


# Tokens out of which everything that a model of this family writes is made, broken in every way.
SNIPPETS = [
    *["Hi", " there", "\n\n", "\n", "你好", "😀", "</think>", "<think>", "｜DSML｜", "<", "</", ">", '">', ">\n"],
    *["tool_calls", " calls", "invoke", " invoke", ' name="f"', "parameter", " parameter", ' name="a"', "{", "}", "["],
    *[' string="true"', ' string="false"', "1", "1.", ",", '"', "\\", "null", "three", "<｜User｜>", "stop", "op"],
]
STARTS = st.sampled_from(list(AnswerStart))


@st.composite
def id_lists(draw: st.DrawFn) -> list[str | int]:
    """Snippets, and halves of characters as numbers."""
    pieces: list[str | int] = draw(st.lists(st.one_of(st.sampled_from(SNIPPETS), st.integers(0, 5)), max_size=40))
    return pieces


def ids_of(answers: Answers, a_shape: Shapes, pieces: Sequence[str | int]) -> list[int]:
    halves = half_characters(answers.codec, a_shape)
    ids: list[int] = []
    for piece in pieces:
        ids += answers.ids(piece) if isinstance(piece, str) else [halves[piece]]
    return ids


@given(
    pieces=id_lists(),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    start=STARTS,
    stops=st.sampled_from([(), ("stop",), ("op", "\n\n<")]),
    has_logprobs=st.booleans(),
)
@PROPERTIES
@example(["Hi", 0, 1, 2, 2, 4], [2], AnswerStart.TEXT, (), True)
def test_what_comes_out_does_not_depend_on_batches(
    answers: Answers,
    a_shape: Shapes,
    pieces: list[str | int],
    sizes: list[int],
    start: AnswerStart,
    stops: tuple[str, ...],
    has_logprobs: bool,
) -> None:
    ids = ids_of(answers, a_shape, pieces)
    shape = {"start": start, "stop_strings": stops, "has_logprobs": has_logprobs}
    one_by_one = answers.read(ids, **shape)
    assert answers.read(ids, sizes, **shape) == one_by_one
    assert one_by_one.reasoning_tokens <= one_by_one.completion_tokens
    if has_logprobs:
        spelled = [token.spelling for token in one_by_one.tokens]
        # One by one: a tag between two halves of a character makes two broken ones of it.
        assert sum(len(half.decode(errors="replace")) for half in spelled) >= len(one_by_one.text.rstrip("\n"))
        assert len(b"".join(spelled[:-1]).decode(errors="ignore")) <= len(one_by_one.text)


@given(pieces=id_lists(), start=STARTS)
@PROPERTIES
def test_arguments_of_a_call_that_ended_are_an_object(
    answers: Answers, a_shape: Shapes, pieces: list[str | int], start: AnswerStart
) -> None:
    check_calls(answers.read(ids_of(answers, a_shape, pieces), start=start).parts)


@given(
    value=st.lists(st.sampled_from(SNIPPETS), max_size=8).map("".join),
    is_text=st.sampled_from(["true", "false", "maybe"]),
    second=st.lists(st.sampled_from(SNIPPETS), max_size=4).map("".join),
)
@PROPERTIES
@example("3}", "false", "1")
@example('{"a": [1}', "false", "")
def test_arguments_are_an_object_whatever_a_parameter_is(
    answers: Answers, value: str, is_text: str, second: str
) -> None:
    calls = answers.block(answers.invoke("f", ("a", is_text, value), ("b", "false", second)), answers.invoke("g"))
    check_calls(answers.read(answers.ids(calls)).parts)


def check_calls(parts: Sequence[Part]) -> None:
    """Order, and JSON in each call that has its end."""
    text = ""
    for part, following in pairwise([*parts, Text("")]):
        if isinstance(part, CallBegin):
            text = ""
        if isinstance(part, CallArguments):
            text += part.text
            assert isinstance(following, CallEnd) or following == Text("")
        if isinstance(part, CallEnd):
            assert isinstance(json.loads(text), dict)
