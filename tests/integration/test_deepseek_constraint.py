"""What a DeepSeek model may generate: our structural tags, compiled by xgrammar on the model's vocabulary."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from tokenizers import Tokenizer

from shoal_testkit.deepseek_answers import DeepseekAnswers, segments
from shoal_testkit.deepseek_tokenizer import write_v4, write_v41_stand_in
from shoal_tokenizer.codec.api import AnswerShape, Api, CallBegin, CallEnd, Codec
from shoal_tokenizer.codec.conversation import AnswerFormat, Conversation, Thinking, ToolChoice, ToolMode
from shoal_tokenizer.model_files import load_codec

END_OF_TURN, THINK_END, DSML = 1, 128822, 128825
HEAD_TOKENS = 129_280  # of the model's output layer
STRICT = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
    "required": ["city"],
    "additionalProperties": False,
}
USER = {"role": "user", "content": "Hi"}
REQUIRED, NONE = ToolMode.REQUIRED, ToolMode.NONE


def a_tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", **function}}


LOOK = a_tool("look", parameters=STRICT, strict=True)
LOOSE = a_tool("loose", parameters=STRICT)
TOOLS = [LOOK, LOOSE]


class Grammars:
    """Compiles for one model and asks what is accepted."""

    def __init__(self, folder: Path) -> None:
        self.codec: Codec = load_codec(folder, folder.name, 1)
        self.is_v4 = folder.name == "v4"
        answers = DeepseekAnswers(self.is_v4)
        self.invoke, self.block = answers.invoke, answers.block
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        spelled = [tokenizer.id_to_token(token_id) or "" for token_id in range(tokenizer.get_vocab_size())]
        self.vocabulary = xgrammar.TokenizerInfo(
            spelled, xgrammar.VocabType.BYTE_LEVEL, vocab_size=HEAD_TOKENS, stop_token_ids=[END_OF_TURN]
        )
        self.compiler = xgrammar.GrammarCompiler(self.vocabulary)

    def ids(self, text: str) -> list[int]:
        """Marks are tokens, as the model writes them."""
        return self.codec.encoder.encode(segments(text))

    def spelled_ids(self, text: str) -> list[int]:
        return self.codec.encoder.encode([(text, False)])

    def matcher(self, conversation: Conversation) -> xgrammar.GrammarMatcher:
        constraint = self.codec.renderer.render(conversation, 0).constraint
        assert constraint is not None
        return xgrammar.GrammarMatcher(self.compiler.compile_structural_tag(constraint))

    def accepts(self, conversation: Conversation, answer: str | Sequence[int]) -> bool:
        """Whether this may be generated, and the turn may end behind it."""
        return ends_well(self.matcher(conversation), self.ids(answer) if isinstance(answer, str) else answer)


def ends_well(matcher: xgrammar.GrammarMatcher, ids: Sequence[int]) -> bool:
    return all(matcher.accept_token(token_id) for token_id in [*ids, END_OF_TURN])


@pytest.fixture(scope="module", params=["v4", "v41"])
def grammars(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    write = write_v4 if request.param == "v4" else write_v41_stand_in
    return Grammars(write(tmp_path_factory.mktemp("deepseek") / request.param))


def test_a_required_call_comes_behind_the_reasoning(grammars: Grammars) -> None:
    asked = Conversation([USER], TOOLS, ToolChoice(REQUIRED))
    call = grammars.invoke("look", ("city", "true", 'Zü "rich" </b>'), ("days", "false", "[1, 2]"))
    block = grammars.block(call)
    assert grammars.accepts(asked, f"Hm, <b>so</b> 你好 😀.</think>{block}")
    assert grammars.accepts(asked, f"</think>{grammars.block(call, grammars.invoke('loose', ('x', 'false', '[{}]')))}")
    assert not grammars.accepts(asked, block)  # still thinking
    assert not grammars.accepts(asked, "Hm.</think>It rains.")
    assert not grammars.accepts(asked, f"Hm.</think>It rains.{block}")
    assert not grammars.accepts(asked, f"Hm.</think>{block}It rains.")
    assert not grammars.accepts(asked, f"Hm.</think>{grammars.block()}")
    assert not grammars.accepts(asked, f"Hm.</think>{grammars.block(grammars.invoke('other'))}")
    assert not grammars.accepts(asked, f"Hm.</think>{block[:-4]}")
    assert not grammars.accepts(asked, "Hm.")


def test_a_required_call_without_thinking_goes_on_in_the_block(grammars: Grammars) -> None:
    asked = Conversation([USER], TOOLS, ToolChoice(REQUIRED), Thinking(False))
    rest = grammars.block(grammars.invoke("loose")).split(">\n", 1)[1]
    assert grammars.accepts(asked, rest)
    assert not grammars.accepts(asked, grammars.block(grammars.invoke("loose")))


def test_arguments_of_a_strict_tool_follow_its_schema(grammars: Grammars) -> None:
    for choice in (ToolChoice(REQUIRED), ToolChoice()):
        asked = Conversation([USER], TOOLS, choice, Thinking(choice.mode is REQUIRED))
        before = "</think>" if choice.mode is REQUIRED else ""
        for parameters in (
            [("city", "true", "Bern"), ("days", "false", "[one]")],
            [("days", "false", "[1]")],
            [("city", "false", "1")],
            [("city", "true", "Bern"), ("more", "true", "x")],
            [],
        ):
            assert not grammars.accepts(asked, before + grammars.block(grammars.invoke("look", *parameters)))
            assert grammars.accepts(asked, before + grammars.block(grammars.invoke("loose", *parameters))) != (
                ("days", "false", "[one]") in parameters
            )


def test_calls_that_may_happen(grammars: Grammars) -> None:
    asked = Conversation([USER], TOOLS, thinking=Thinking(False))
    good = grammars.block(grammars.invoke("look", ("city", "true", "Bern")))
    assert grammars.accepts(asked, "It rains. <b> ｜ </b>")
    assert grammars.accepts(asked, good) and grammars.accepts(asked, f"Let me see.{good}")
    assert not grammars.accepts(asked, f"Let me see.{good} Done.")
    assert not grammars.accepts(asked, "It </think> rains.")
    unbound = Conversation([USER], [LOOSE], thinking=Thinking(False))
    assert grammars.codec.renderer.render(unbound, 0).constraint is None


def test_names_and_a_single_call(grammars: Grammars) -> None:
    loose, look = grammars.invoke("loose"), grammars.invoke("look", ("city", "true", "Bern"))
    for mode in (REQUIRED, ToolMode.AUTO):
        named = Conversation([USER], TOOLS, ToolChoice(mode, ("loose",)), Thinking(False))
        single = Conversation([USER], TOOLS, ToolChoice(mode, is_single=True), Thinking(False))
        cut = 1 if mode is REQUIRED else 0

        def block(*invokes: str, cut: int = cut) -> str:
            return grammars.block(*invokes).split(">\n", cut)[-1]

        assert grammars.accepts(named, block(loose, loose)) and not grammars.accepts(named, block(look))
        assert grammars.accepts(single, block(look)) and not grammars.accepts(single, block(look, loose))


def test_tools_that_must_not_be_called(grammars: Grammars) -> None:
    asked = Conversation([USER], TOOLS, ToolChoice(NONE))
    assert grammars.accepts(asked, "Hm.</think>It rains.")
    assert not grammars.accepts(asked, f"Hm.</think>{grammars.block(grammars.invoke('loose'))}")


def test_formats_of_the_answer(grammars: Grammars) -> None:
    text = json.dumps({"city": "Zürich", "days": [1]}, ensure_ascii=False)
    asked = Conversation([USER], answer_format=AnswerFormat(STRICT))
    assert grammars.accepts(asked, f"Hm.</think>{text}")
    assert not grammars.accepts(asked, f"Hm.</think>{text} So.") and not grammars.accepts(asked, "Hm.</think>{}")
    anything = Conversation([USER], thinking=Thinking(False), answer_format=AnswerFormat())
    assert grammars.accepts(anything, '{"a": [null]}') and not grammars.accepts(anything, "[1]")
    regex = Conversation([USER], thinking=Thinking(False), answer_format=AnswerFormat(regex="[ab]+c"))
    assert grammars.accepts(regex, "abbac") and not grammars.accepts(regex, "abba")
    with_tools = Conversation([USER], TOOLS, thinking=Thinking(False), answer_format=AnswerFormat(STRICT))
    assert grammars.accepts(with_tools, text)
    assert grammars.accepts(with_tools, grammars.block(grammars.invoke("loose")))
    assert not grammars.accepts(with_tools, "It rains.")


def test_a_mark_in_other_tokens_is_no_mark(grammars: Grammars) -> None:
    asked = Conversation([USER], TOOLS, ToolChoice(REQUIRED))
    block = grammars.block(grammars.invoke("loose"))
    spelled = grammars.spelled_ids
    assert not grammars.accepts(asked, [*grammars.ids("Hm.</think>"), *spelled(block)])
    assert not grammars.accepts(asked, [*spelled("Hm.</think>"), *grammars.ids(block)])
    assert grammars.accepts(asked, [*spelled("Hm.</think> hm"), *grammars.ids(f"</think>{block}")])


def test_the_grammar_is_xgrammars_own_for_the_model(grammars: Grammars) -> None:
    name = "deepseek_v4" if grammars.is_v4 else "deepseek_v4_1"
    looks = [grammars.invoke("look", ("city", "true", "Bern")), grammars.invoke("look", ("days", "false", "[1]"))]
    answers = [
        "It rains.",
        "Hm.</think>It rains.",
        *(f"Hm.</think>{before}{grammars.block(*calls)}" for before in ("", "So.") for calls in (looks[:1], looks)),
        f"Hm.</think>{grammars.block(looks[0], looks[0])}",
        f"Hm.</think>{grammars.block()}",
        f"Hm.</think>{grammars.block(grammars.invoke('other'))}",
    ]
    for mode in ("required", "auto"):
        tag = xgrammar.get_model_structural_tag(name, tools=[LOOK], tool_choice=mode, reasoning="enabled")
        theirs = grammars.compiler.compile_structural_tag(tag)
        asked = Conversation([USER], [LOOK], ToolChoice(ToolMode(mode)))
        for answer in answers:
            expected = ends_well(xgrammar.GrammarMatcher(theirs), grammars.ids(answer))
            assert grammars.accepts(asked, answer) == expected, (mode, answer)


@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_knows_nothing_calls_all_the_same(grammars: Grammars, seed: int) -> None:
    rendered = grammars.codec.renderer.render(Conversation([USER], TOOLS, ToolChoice(REQUIRED)), 0)
    ids = random_answer(grammars, rendered.constraint or "", random.Random(seed))
    shape = AnswerShape(Api.CHAT_COMPLETIONS, "r", 0, "m", True, start=rendered.start, has_tools=True)
    parser = grammars.codec.new_parser(shape)
    parts = [*parser.push(ids, ()).parts, *parser.close().parts]
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    assert names and set(names) <= {"look", "loose"}
    assert parts[-1] == CallEnd() and sum(part == CallEnd() for part in parts) == len(names)


def random_answer(grammars: Grammars, constraint: str, dice: random.Random) -> list[int]:
    """Any allowed token; now and then the end of a value or of the reasoning is begun, so that the walk has an end."""
    matcher = xgrammar.GrammarMatcher(grammars.compiler.compile_structural_tag(constraint))
    bitmask = xgrammar.allocate_token_bitmask(1, HEAD_TOKENS)
    space = "" if grammars.is_v4 else " "
    ends = [grammars.ids(f"</｜DSML｜{space}parameter>\n"), [THINK_END], [END_OF_TURN], [DSML]]
    ends += [grammars.ids(text) for text in ('"', "]", "}")]
    ids: list[int] = []
    wanted: list[int] = []
    while len(ids) < 3000:
        matcher.fill_next_token_bitmask(bitmask)
        words = bitmask[0].tolist()
        if not wanted and dice.random() < 0.3:
            wanted = list(dice.choice(ends))
        if wanted and is_allowed(words, wanted[0]):
            token_id = wanted.pop(0)
        else:
            wanted = []
            token_id = any_allowed(words, dice)
        assert matcher.accept_token(token_id)
        if token_id == END_OF_TURN:
            return ids
        ids.append(token_id)
    raise AssertionError("the walk had no end")


def is_allowed(words: Sequence[int], token_id: int) -> bool:
    return bool(words[token_id >> 5] >> (token_id & 31) & 1)


def any_allowed(words: Sequence[int], dice: random.Random) -> int:
    for _ in range(100):
        token_id = dice.randrange(HEAD_TOKENS)
        if is_allowed(words, token_id):
            return token_id
    return dice.choice([32 * n + bit for n, word in enumerate(words) if word for bit in range(32) if word >> bit & 1])
