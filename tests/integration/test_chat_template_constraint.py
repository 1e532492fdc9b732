"""What the constraints of chat templates let an engine generate, by the library that enforces them there."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from tokenizers import Tokenizer

from shoal_testkit.chat_models import CHAT_MODELS
from shoal_tokenizer.codec.api import AnswerShape, Api, CallBegin, Codec, Text
from shoal_tokenizer.codec.conversation import AnswerFormat, Conversation, Thinking, ToolChoice, ToolMode
from shoal_tokenizer.codec.vocabulary import read_vocabulary
from shoal_tokenizer.model_files import load_codec

USER = {"role": "user", "content": "Hi"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


TOOLS = [tool("look"), tool("find")]
STRICT = [tool("look", strict=True), tool("find")]
CITY = {"city": "Paris", "days": 3}


class Model:
    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.codec: Codec = load_codec(CHAT_MODELS[name].write(folder), name, 0)
        self.tokenizer: Tokenizer = CHAT_MODELS[name].tokenizer()
        self.eos = self.tokenizer.token_to_id(CHAT_MODELS[name].eos)
        vocabulary = read_vocabulary(json.loads(self.tokenizer.to_str()))
        facts = xgrammar.TokenizerInfo(list(vocabulary.spelled), stop_token_ids=[self.eos])
        self.compiler = xgrammar.GrammarCompiler(facts)

    def call(self, name: str = "look", arguments: dict[str, Any] = CITY) -> str:
        if self.name == "qwen3_coder":
            values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
            return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
        if self.name == "llama3":
            return f'{{"name": "{name}", "parameters": {json.dumps(arguments)}}}'
        return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'

    def takes(self, conversation: Conversation, answer: str, *, is_spelled: bool = False) -> bool:
        """Whether the engine may generate this whole answer."""
        constraint = self.codec.renderer.render(conversation, 0).constraint
        assert constraint is not None
        matcher = xgrammar.GrammarMatcher(self.compiler.compile_structural_tag(constraint))
        ids = self.spelled(answer) if is_spelled else self.tokenizer.encode(answer).ids
        return all(matcher.accept_token(i) for i in ids) and matcher.accept_token(self.eos)

    def spelled(self, text: str) -> Sequence[int]:
        return [i for character in text for i in self.tokenizer.encode(character).ids]

    def parts(self, conversation: Conversation, answer: str) -> list[Any]:
        texts = self.codec.renderer.render(conversation, 0).text_parameters
        shape = AnswerShape(Api.MESSAGES, "r", 0, "m", False, has_tools=True, text_parameters=texts)
        parser = self.codec.new_parser(shape)
        return parser.push(self.tokenizer.encode(answer).ids, ()).parts + parser.close().parts


@pytest.fixture(scope="module", params=["qwen3", "qwen3_coder", "llama3", "spelled"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


def required(**more: Any) -> ToolChoice:
    return ToolChoice(ToolMode.REQUIRED, **more)


def test_a_required_call_is_a_call(model: Model) -> None:
    conversation = Conversation([USER], TOOLS, required(), Thinking(False))
    assert model.takes(conversation, model.call()) and model.takes(conversation, model.call("find", {}))
    between = "; " if model.name == "llama3" else "\n"
    assert model.takes(conversation, model.call() + between + model.call("find"))
    for refused in ("Hi", "", model.call("other"), model.call() + " and more", model.call()[:-3]):
        assert not model.takes(conversation, refused), refused
    begins = [part.name for part in model.parts(conversation, model.call()) if isinstance(part, CallBegin)]
    assert begins == ["look"]


def test_one_call_and_certain_names(model: Model) -> None:
    between = "; " if model.name == "llama3" else "\n"
    single = Conversation([USER], TOOLS, required(names=("find",), is_single=True), Thinking(False))
    assert model.takes(single, model.call("find"))
    assert not model.takes(single, model.call("look"))
    assert not model.takes(single, model.call("find") + between + model.call("find"))


def test_text_may_come_before_calls_that_are_not_required(model: Model) -> None:
    conversation = Conversation([USER], TOOLS, ToolChoice(is_single=True, names=("look",)), Thinking(False))
    text = "" if model.name == "llama3" else "I look.\n"
    assert model.takes(conversation, "Just text.")
    assert model.takes(conversation, text + model.call())
    assert not model.takes(conversation, text + model.call("find"))
    assert not model.takes(conversation, text + model.call() + "\n" + model.call())


def test_strict_arguments_follow_their_schema(model: Model) -> None:
    conversation = Conversation([USER], STRICT, required(), Thinking(False))
    assert model.takes(conversation, model.call())
    assert not model.takes(conversation, model.call(arguments={"city": "Paris"}))
    assert not model.takes(conversation, model.call(arguments={"city": "Paris", "days": 3, "n": 1}))
    assert model.takes(conversation, model.call("find", {"n": 1}))  # not strict: any object
    free = Conversation([USER], STRICT, thinking=Thinking(False))
    assert model.takes(free, "Text.") and not model.takes(free, model.call(arguments={"city": "Paris"}))


def test_a_list_that_says_nothing_of_its_items_holds_anything(model: Model) -> None:
    parameters = {"type": "object", "properties": {"days": {"type": "array"}}, "required": ["days"]}
    strict = [{"type": "function", "function": {"name": "look", "parameters": parameters, "strict": True}}]
    conversation = Conversation([USER], strict, required(), Thinking(False))
    assert model.takes(conversation, model.call(arguments={"days": [1, 2]}))
    assert not model.takes(conversation, model.call(arguments={"days": 1}))


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (AnswerFormat(), '{"a": [1]}', "[1]"),
        (AnswerFormat(schema=SCHEMA), '{"city": "x", "days": 1}', '{"city": "x"}'),
        (
            AnswerFormat(schema={"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}}),
            '{"n": {"n": {}}}',
            '{"n": 1}',
        ),
        (AnswerFormat(regex="[ab]+c"), "abac", "abca"),
    ],
)
def test_the_answers_format(model: Model, wanted: AnswerFormat, good: str, bad: str) -> None:
    alone = Conversation([USER], thinking=Thinking(False), answer_format=wanted)
    assert model.takes(alone, good) and not model.takes(alone, bad)
    with_tools = Conversation([USER], TOOLS, thinking=Thinking(False), answer_format=wanted)
    assert model.takes(with_tools, good) and model.takes(with_tools, model.call()) and not model.takes(with_tools, bad)


@pytest.mark.parametrize(
    ("is_on", "answer", "is_taken"),
    [
        (None, "<think>\nHm <tool_call> {.\n</think>\n\n", True),
        (None, "", True),
        (None, "<think>\nHm.\n", False),
        (None, "Hm.\n</think>\n\n", False),
        (False, "<think>\nHm.\n</think>\n\n", False),
    ],
)
def test_reasoning_comes_first_where_the_model_may_reason(
    tmp_path: Path, is_on: bool | None, answer: str, is_taken: bool
) -> None:
    model = Model("qwen3", tmp_path)
    for conversation, rest in (
        (Conversation([USER], TOOLS, required(), Thinking(is_on)), model.call()),
        (Conversation([USER], thinking=Thinking(is_on), answer_format=AnswerFormat()), "{}"),
    ):
        assert model.takes(conversation, answer + rest) == is_taken


@pytest.mark.parametrize("name", ["r1", "spelled"])
def test_reasoning_that_the_prompt_opened_must_end(name: str, tmp_path: Path) -> None:
    model = Model(name, tmp_path)
    conversation = Conversation([USER], thinking=Thinking(True), answer_format=AnswerFormat())
    after = "\n\n" if name == "r1" else ""
    assert model.takes(conversation, "Hm {.</think>" + after + "{}")
    assert not model.takes(conversation, "{}") and not model.takes(conversation, "Hm.</think>" + after + "x")


def test_tags_that_are_tokens_cannot_be_spelled_out(tmp_path: Path) -> None:
    """To the parser they would be text, and a required call would be none."""
    model = Model("qwen3", tmp_path)
    conversation = Conversation([USER], TOOLS, required(), Thinking(False))
    assert model.takes(conversation, model.call()) and not model.takes(conversation, model.call(), is_spelled=True)
    assert [type(part) for part in model.parts(conversation, "Hi")] == [Text]
