"""Answers in each format -> parts; vectors first, then properties over mutated answers."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shoal_testkit.chat_models import CHAT_MODELS
from shoal_tokenizer.codec.api import (
    AnswerShape,
    AnswerStart,
    Api,
    CallArguments,
    CallBegin,
    CallEnd,
    Delta,
    OutputParser,
    Part,
    Reasoning,
    Text,
    TokenLogprob,
)
from shoal_tokenizer.codec.chat_template.answer_parser import AnswerParser, new_parser
from shoal_tokenizer.codec.chat_template.formats import AnswerFormats
from shoal_tokenizer.codec.chat_template.markers import Markers
from shoal_tokenizer.codec.chat_template.renderer import ChatTemplate
from shoal_tokenizer.codec.text_parser import TextParser
from shoal_tokenizer.codec.vocabulary import Vocabulary, read_vocabulary

PARAMETERS = {"look": ("city", "body"), "n": ()}


class Model:
    """The output side of a chat model."""

    def __init__(self, name: str) -> None:
        self.tokenizer: Tokenizer = CHAT_MODELS[name].tokenizer()
        spec = json.loads(self.tokenizer.to_str())
        self.vocabulary: Vocabulary = read_vocabulary(spec)
        special = {"bos_token": CHAT_MODELS[name].bos or "", "eos_token": CHAT_MODELS[name].eos}
        template = ChatTemplate(CHAT_MODELS[name].template, special, Markers(spec["added_tokens"]))
        self.formats: AnswerFormats = template.abilities.formats
        self.alphabet = [i for i in range(self.tokenizer.get_vocab_size())]

    def ids(self, answer: str) -> list[int]:
        return list(self.tokenizer.encode(answer).ids)

    def spelled_ids(self, text: str) -> list[int]:
        """The same text without any token of a tag."""
        return [i for character in text for i in self.tokenizer.encode(character).ids]

    def parser(self, **changes: Any) -> OutputParser:
        return new_parser(self.vocabulary, self.formats, a_shape(**changes))


def a_shape(**changes: Any) -> AnswerShape:
    values: dict[str, Any] = {
        "api": Api.CHAT_COMPLETIONS,
        "response_id": "r",
        "created_s": 0,
        "model": "m",
        "is_stream": True,
        "has_tools": True,
        "text_parameters": PARAMETERS,
    }
    return AnswerShape(**(values | changes))


MODELS = {name: Model(name) for name in CHAT_MODELS}


def merged(parts: Sequence[Part]) -> list[Part]:
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if type(part) is type(last) and isinstance(part, Text | Reasoning | CallArguments):
            result[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr]
        else:
            result.append(part)
    return result


def parse(parser: OutputParser, ids: Sequence[int], seed: Sequence[int] = ()) -> list[Part]:
    edges = sorted({0, len(ids), *(n % (len(ids) + 1) for n in seed)})
    parts = [part for a, b in pairwise(edges) for part in parser.push(ids[a:b], ()).parts]
    return merged([*parts, *parser.close().parts])


def call(name: str, arguments: str) -> list[Part]:
    return [CallBegin(name), CallArguments(arguments), CallEnd()]


HERMES = '<tool_call>\n{"name": "look", "arguments": {"city": "Pâris", "n": [1, {"a": null}]}}\n</tool_call>'
HERMES_CALL = call("look", '{"city": "Pâris", "n": [1, {"a": null}]}')
CODER = (
    "<tool_call>\n<function=look>\n<parameter=city>\nPâris\n</parameter>\n<parameter=n>\n[1, 2]\n</parameter>\n"
    "</function>\n</tool_call>"
)
CODER_CALL = call("look", '{"city": "Pâris", "n": [1, 2]}')
LLAMA = '{"name": "look", "parameters": {"city": "Pâris"}}'
LLAMA_CALL = call("look", '{"city": "Pâris"}')

VECTORS: list[tuple[str, str, list[Part]]] = [
    # Hermes and Qwen
    ("qwen3", HERMES, HERMES_CALL),
    ("qwen3", f"Let me see.\n{HERMES}\n{HERMES}", [Text("Let me see."), *HERMES_CALL, *HERMES_CALL]),
    ("qwen3", f"\n\n{HERMES}\n", HERMES_CALL),
    ("qwen3", f"{HERMES}\nThen?", [*HERMES_CALL, Text("\nThen?")]),
    ("qwen3", f"<think>\nHm.\n</think>\n\n{HERMES}", [Reasoning("Hm."), *HERMES_CALL]),
    ("qwen3", "<think>\n</think>\n\nHi", [Text("Hi")]),
    ("qwen3", "<think>\nA\n\nB</think>Hi", [Reasoning("A\n\nB"), Text("Hi")]),
    ("qwen3", "a </think> b", [Text("a </think> b")]),
    ("qwen3", "Hi\n\n", [Text("Hi\n\n")]),
    ("qwen3", '<tool_call>{"name":"look","arguments":{}}</tool_call>', call("look", "{}")),
    ("qwen3", '<tool_call>{"arguments": {"n": 1}, "name": "look"}</tool_call>', call("look", '{"n": 1}')),
    ("qwen3", '<tool_call>{"name": "look", "arguments": "{\\"n\\": 1}"}</tool_call>', call("look", '{"n": 1}')),
    ("qwen3", '<tool_call>{"name": "look"}</tool_call>', call("look", "{}")),
    ("qwen3", '<tool_call>{"name": "look", "arguments": {"n": 1}}}\n</tool_call>', call("look", '{"n": 1}')),
    ("qwen3", '<tool_call>{"name": "look", "arguments": {"n": 1}', call("look", '{"n": 1}')),
    ("qwen3", '<tool_call>{"name": "look", "arguments": {"n": tru}}</tool_call>', call("look", '{"n": "tru"}')),
    ("qwen3", "<tool_call>look!</tool_call> x", [Text("<tool_call>look!</tool_call> x")]),
    ("qwen3", '<tool_call>{"nam', [Text('<tool_call>{"nam')]),
    ("qwen3", '<tool_call>{"name": 5}</tool_call>', [Text('<tool_call>{"name": 5}</tool_call>')]),
    ("qwen3", '<tool_call>{"name": "look", "arguments": {"n": "a', [*call("look", '{"n": "a')[:2]]),
    # the same spelled out, where the tags are no tokens
    ("spelled", HERMES, HERMES_CALL),
    ("spelled", f"Let me see.\n{HERMES}\n{HERMES}", [Text("Let me see."), *HERMES_CALL, *HERMES_CALL]),
    ("spelled", f"<think>Hm.</think>{HERMES}", [Reasoning("Hm."), *HERMES_CALL]),
    ("spelled", "  <think>Hm.</think>Hi", [Reasoning("Hm."), Text("Hi")]),
    ("spelled", "a <think>b</think>", [Text("a <think>b</think>")]),
    ("spelled", "the <tool_call> tag\n", [Text("the <tool_call> tag\n")]),
    ("spelled", f"<tool_call> {HERMES}", [Text("<tool_call> "), *HERMES_CALL]),
    (
        "spelled",
        '<tool_call>{"name": "look", "arguments": {"n": "</tool_call>"}}</tool_call>!',
        [*call("look", '{"n": "</tool_call>"}'), Text("!")],
    ),
    ("spelled", '<tool_call>{"arguments": {}, "name": "look"}</tool_call>', call("look", "{}")),
    (
        "spelled",
        '<tool_call>{"name": "look", "arguments": {"n": [1</tool_call>.',
        [*call("look", '{"n": [1]}'), Text(".")],
    ),
    # Qwen3-Coder
    ("qwen3_coder", CODER, CODER_CALL),
    ("qwen3_coder", f"I look.\n{CODER}\n{CODER}", [Text("I look."), *CODER_CALL, *CODER_CALL]),
    ("qwen3_coder", "<tool_call>\n<function=n>\n</function>\n</tool_call>", call("n", "{}")),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look>\n<parameter=body>\n\n x </parameter> y\n\n</parameter>\n"
        "</function>\n</tool_call>",
        call("look", '{"body": "\\n x </parameter> y\\n"}'),
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look>\n<parameter=city>\n1\n</parameter>\n<parameter=n>\nTrue\n</parameter>\n"
        "<parameter=m>\n{x\n</parameter>\n</function>\n</tool_call>",
        call("look", '{"city": "1", "n": true, "m": "{x"}'),
    ),
    ("qwen3_coder", "<tool_call>\n<function=look>\n<parameter=city>\nA</tool_call>", call("look", '{"city": "A"}')),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look>\nhm\n<parameter=n>\n1\n</parameter>\n</function></tool_call>",
        call("look", '{"": "hm", "n": 1}'),
    ),
    ("qwen3_coder", "<tool_call>\nlook\n</tool_call>", [Text("<tool_call>\nlook\n</tool_call>")]),
    ("qwen3_coder", "<tool_call>\n<function=look", [Text("<tool_call>\n<function=look")]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look>\n<parameter=city>\nPa",
        [CallBegin("look"), CallArguments('{"city": "Pa')],
    ),
    # Llama 3
    ("llama3", LLAMA, LLAMA_CALL),
    ("llama3", f"<|python_tag|>{LLAMA}", LLAMA_CALL),
    ("llama3", f"{LLAMA}; {LLAMA}", [*LLAMA_CALL, *LLAMA_CALL]),
    ("llama3", f"\n{LLAMA}\n{LLAMA}\n", [*LLAMA_CALL, *LLAMA_CALL]),
    ("llama3", '{"type": "function", "name": "look", "parameters": {"city": "Pâris"}}', LLAMA_CALL),
    ("llama3", '{"name": "Bob", "parameters": {"age": 1}}', [Text('{"name": "Bob", "parameters": {"age": 1}}')]),
    ("llama3", '{"answer": 42}', [Text('{"answer": 42}')]),
    ("llama3", f"See: {LLAMA}", [Text(f"See: {LLAMA}")]),
    ("llama3", f"{LLAMA} is a call", [*LLAMA_CALL, Text(" is a call")]),
    # the prompt opened the reasoning, there are no calls
    ("r1", HERMES, [Text(HERMES)]),
]


@pytest.mark.parametrize(("name", "answer", "expected"), VECTORS)
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_an_answer_is_read(name: str, answer: str, expected: list[Part], size: int) -> None:
    model = MODELS[name]
    ids = model.ids(answer)
    assert parse(model.parser(), ids, range(0, len(ids), size)) == expected


@pytest.mark.parametrize("name", ["qwen3", "qwen3_coder"])
def test_what_a_model_spells_out_stays_text(name: str) -> None:
    """Where the tags are tokens, only these are the tags."""
    answer = f"<think>\nx\n</think>\n\n{HERMES}\n{CODER}"
    assert parse(MODELS[name].parser(), MODELS[name].spelled_ids(answer)) == [Text(answer)]


def test_a_tag_spelled_out_within_a_call_is_a_part_of_the_arguments() -> None:
    model = MODELS["qwen3"]
    ids = model.ids('<tool_call>{"name": "look", "arguments": {"city": "') + model.spelled_ids("</tool_call>")
    parts = parse(model.parser(), ids + model.ids('"}}\n</tool_call>'))
    assert parts == call("look", '{"city": "</tool_call>"}')


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_without_tools_calls_are_text(name: str) -> None:
    model = MODELS[name]
    answer = {"qwen3_coder": CODER, "llama3": LLAMA}.get(name, HERMES)
    assert parse(model.parser(has_tools=False), model.ids(answer)) == [Text(answer)]


def test_a_model_without_grammar_keeps_the_parser_of_plain_text() -> None:
    model = MODELS["qwen3_coder"]
    assert isinstance(model.parser(has_tools=False), TextParser)
    assert isinstance(model.parser(), AnswerParser)


@pytest.mark.parametrize(
    ("answer", "expected", "reasoning_tokens"),
    [
        ("Hm.\n</think>\n\nHi", [Reasoning("Hm."), Text("Hi")], len(MODELS["r1"].ids("Hm.\n")) + 1),
        ("<think>\nHm.</think>Hi", [Reasoning("Hm."), Text("Hi")], len(MODELS["r1"].ids("<think>\nHm.")) + 1),
        ("Hm. <", [Reasoning("Hm. <")], len(MODELS["r1"].ids("Hm. <"))),
        ("</think>\n\nHi", [Text("Hi")], 1),
    ],
)
def test_reasoning_that_the_prompt_opened(answer: str, expected: list[Part], reasoning_tokens: int) -> None:
    model = MODELS["r1"]
    parser = model.parser(start=AnswerStart.REASONING)
    assert parse(parser, model.ids(answer)) == expected
    assert (parser.reasoning_tokens, parser.completion_tokens) == (reasoning_tokens, len(model.ids(answer)))


@pytest.mark.parametrize(
    ("name", "answer", "reasoning"),
    [
        ("qwen3", "<think>\nHm.\n</think>\n\nHi", "<think>\nHm.\n</think>"),
        ("qwen3", "Hi", ""),
        ("spelled", "<think>Hm.</think>Hi", "<think>Hm.</think>"),
    ],
)
def test_tokens_of_reasoning_are_counted_with_their_tags(name: str, answer: str, reasoning: str) -> None:
    model = MODELS[name]
    parser = model.parser()
    parser.push(model.ids(answer), ())
    assert parser.reasoning_tokens == len(model.ids(reasoning))


def test_stop_strings_end_the_text_only() -> None:
    model = MODELS["qwen3"]
    answer = (
        '<think>\na stop\n</think>\n\nb\n<tool_call>{"name": "look", "arguments": {"n": "stop"}}</tool_call>c stop d'
    )
    parser = model.parser(stop_strings=("stop", "st\n<"))
    ids = model.ids(answer)
    parts = parse(parser, ids)
    assert parts == [Reasoning("a stop"), Text("b"), *call("look", '{"n": "stop"}'), Text("c ")]
    assert parser.stop_string == "stop" and parser.completion_tokens < len(ids)
    assert parser.push(ids, ()) == Delta() and parser.close() == Delta()


def test_a_stop_string_does_not_go_on_behind_a_call() -> None:
    model = MODELS["qwen3"]
    parser = model.parser(stop_strings=("xy",))
    parts = parse(parser, model.ids(f"x\n{HERMES}y"))
    assert parts == [Text("x"), *HERMES_CALL, Text("y")] and parser.stop_string is None


def test_logprobs_are_those_of_the_text() -> None:
    model = MODELS["qwen3"]
    answer = f"<think>\nHm.\n</think>\n\nHi there\n{HERMES}"
    ids = model.ids(answer)
    parser = model.parser(has_logprobs=True)
    deltas = [parser.push([i], [TokenLogprob(-n, (), ())]) for n, i in enumerate(ids)] + [parser.close()]
    assert b"".join(token.spelling for delta in deltas for token in delta.tokens) == b"Hi there"
    assert all(any(isinstance(part, Text) for part in delta.parts) for delta in deltas if delta.tokens)


def test_logprobs_of_what_was_no_call_come_with_its_text() -> None:
    model = MODELS["qwen3"]
    answer = "<tool_call>look!</tool_call>"
    parser = model.parser(has_logprobs=True)
    deltas = [parser.push(model.ids(answer), ()), parser.close()]
    assert b"".join(token.spelling for delta in deltas for token in delta.tokens) == answer.encode()


def test_arguments_come_as_they_are_generated() -> None:
    for name, answer in (("qwen3", HERMES), ("qwen3_coder", CODER), ("llama3", LLAMA), ("spelled", HERMES)):
        model, begun = MODELS[name], ""
        parser = model.parser()
        for token_id in model.ids(answer):
            begun += "".join(p.text for p in parser.push([token_id], ()).parts if isinstance(p, CallArguments))
            if "is" in begun:
                break
        assert begun.endswith('{"city": "Pâris'), name


PIECES = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "\n", " ", ";", '"', "\\", "\\u12", "é"),
    *(
        '{"name": "look", "arguments": {',
        '{"name": "look", "parameters": {"city": ',
        '"city": "',
        "}",
        "}}",
        "{",
        "[",
        "]",
    ),
    *(
        "<function=look>",
        "</function>",
        "<parameter=city>\n",
        "\n</parameter>",
        "<parameter=n>\n",
        ": ",
        ", ",
        "1",
        "tr",
    ),
]
pieces = st.one_of(st.sampled_from(PIECES), st.text(max_size=3))


def mutated(answer: str, edits: Sequence[tuple[int, int, str]]) -> str:
    for place, length, piece in edits:
        place %= len(answer) + 1
        answer = answer[:place] + piece + answer[place + length :]
    return answer


answers = st.one_of(
    st.lists(pieces, max_size=25).map("".join),
    st.builds(
        mutated,
        st.sampled_from([HERMES, CODER, LLAMA, f"{HERMES}\n{HERMES}", f"<think>\nHm.\n</think>\n\nHi\n{CODER}"]),
        st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9), pieces), min_size=1, max_size=4),
    ),
)


def check_calls(parts: Sequence[Part]) -> None:
    """Calls are properly nested, and the arguments of one that ended are an object."""
    arguments: str | None = None
    for part in parts:
        if isinstance(part, CallBegin):
            assert arguments is None
            arguments = ""
        elif isinstance(part, CallArguments):
            assert arguments is not None
            arguments += part.text
        elif isinstance(part, CallEnd):
            assert arguments is not None
            assert isinstance(json.loads(arguments, parse_constant=pytest.fail), dict)
            arguments = None
        else:
            assert arguments is None and part.text


@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("name", CHAT_MODELS)
@given(answer=answers, noise=st.lists(st.integers(0, 420), max_size=6), seed=st.lists(st.integers(0, 500), max_size=8))
@example(answer=HERMES + CODER + LLAMA, noise=[], seed=[])
def test_any_answer_is_read_however_it_is_batched(name: str, answer: str, noise: list[int], seed: list[int]) -> None:
    model = MODELS[name]
    ids = model.ids(answer)
    for n, token_id in enumerate(noise):
        ids.insert((n * 7) % (len(ids) + 1), token_id)
    for start in (AnswerStart.TEXT, AnswerStart.REASONING):
        whole, batched = model.parser(start=start), model.parser(start=start)
        parts = parse(whole, ids)
        assert parse(batched, ids, seed) == parts
        assert batched.reasoning_tokens == whole.reasoning_tokens <= len(ids) == whole.completion_tokens
        check_calls(parts)


@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("name", CHAT_MODELS)
@given(answer=answers)
def test_letters_are_never_lost(name: str, answer: str) -> None:
    """What is left out is white space, tags and JSON's own characters; all else is in some part.

    But for a value that the end of the answer cut: what it was to become cannot be told.
    """
    model = MODELS[name]
    answer = answer.replace("\\", "")
    parts = parse(model.parser(), model.ids(answer))
    assume(sum(isinstance(part, CallBegin) - isinstance(part, CallEnd) for part in parts) == 0)
    shown = "".join(p.name if isinstance(p, CallBegin) else getattr(p, "text", "") for p in parts)
    marked = [character for character in answer if character in "é你"]
    assert len([c for c in json_unescaped(shown) if c in "é你"]) >= len(marked)


def json_unescaped(text: str) -> str:
    return text.replace("\\u00e9", "é")


@pytest.mark.parametrize(
    ("name", "begin", "unit"),
    [
        ("qwen3", "<tool_call>", " "),
        ("qwen3", '<tool_call>{"arguments": [', "1,"),
        ("qwen3", '<tool_call>{"name": "', "a"),
        ("qwen3", "", "\n"),
        ("qwen3_coder", "<tool_call><function=", "a"),
        ("qwen3_coder", "<tool_call><function=look><parameter=n>", "1"),
        ("qwen3_coder", "<tool_call><function=look>", "x"),
        ("qwen3_coder", "<tool_call><function=look><parameter=city>a</parameter>", " "),
        ("llama3", '{"name": "', "a"),
        ("llama3", "", " "),
        ("spelled", "<tool_call>{", " "),
    ],
)
def test_what_is_withheld_is_bounded(name: str, begin: str, unit: str) -> None:
    model = MODELS[name]
    parser = model.parser()
    parser.push(model.ids(begin), ())
    ids = model.spelled_ids(unit) * 70_000
    shown = sum(len(getattr(p, "text", "")) for p in parser.push(ids[:70_000], ()).parts)
    assert shown >= 1000


def test_bytes_that_never_form_a_character_are_not_withheld() -> None:
    model = MODELS["qwen3"]
    parser = model.parser()
    lone = model.tokenizer.token_to_id("Ģ")
    assert model.vocabulary.spelled[lone] >= b"\x80"
    shown = sum(len(parser.push([lone], ()).text) for _ in range(100))
    assert shown >= 98


@pytest.mark.parametrize("name", ["qwen3", "qwen3_coder", "llama3"])
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_call_that_the_model_ended_inside_of_its_arguments_is_an_object(name: str, share: float) -> None:
    model = MODELS[name]
    answer = {"qwen3": HERMES, "qwen3_coder": CODER, "llama3": LLAMA}[name]
    ids = model.ids(answer)
    parser = model.parser()
    parts = [*parser.push(ids[: int(share * len(ids))], ()).parts, *parser.close(is_cut=False).parts]
    check_calls(parts)
    assert sum(isinstance(part, CallBegin) - isinstance(part, CallEnd) for part in parts) == 0


def test_value_that_speaks_of_its_own_end_for_long_is_read_in_one_pass() -> None:
    model = MODELS["qwen3_coder"]
    said = "</parameter>x" * 3000
    answer = f"<tool_call>\n<function=look>\n<parameter=n>\n{said}\n</parameter>\n</function>\n</tool_call>"
    parts = parse(model.parser(), model.ids(answer))
    assert json.loads("".join(p.text for p in parts if isinstance(p, CallArguments))) == {"n": said}
