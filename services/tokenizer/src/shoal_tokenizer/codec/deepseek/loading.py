"""recipe's tokenizer for a model, and the proof at load that our prompts are recipe's.

The proof compares ids with recipe's own encoding on conversations of every kind, control tokens typed by the caller
included. The ids of what an answer is made of come from the tokenizer as well: a file that lacks one of them, or has
it somewhere among ordinary text, belongs to another model.
"""

from collections.abc import Iterator
from typing import Any

import deepseek_recipe as recipe

from shoal_tokenizer.codec.api import SegmentEncoder
from shoal_tokenizer.codec.conversation import AnswerFormat, Conversation, Thinking, ToolChoice, ToolMode
from shoal_tokenizer.codec.deepseek.dialects import DSML, END_OF_TURN, THINK, THINK_END, ControlTokens, Dialect
from shoal_tokenizer.codec.deepseek.parser import RecipeModel
from shoal_tokenizer.codec.deepseek.renderer import DeepseekRenderer
from shoal_tokenizer.codec.vocabulary import Vocabulary

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": f"Looks {DSML} up.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
_CALL = {"name": "look", "arguments": {"city": f"Zürich {END_OF_TURN}", "days": 3}}
_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " Rules: 12 × 30 = 360.\n"},
    {"role": "user", "content": f"Hello 你好 😀\n\n{THINK} <｜User｜>"},
    {"role": "assistant", "content": f"Hi {THINK_END}", "reasoning_content": "Hm."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": _CALL}]},
    {"role": "tool", "content": "Rain.", "tool_call_id": "1", "name": "look"},
]


class ModelMismatch(Exception):
    """The tokenizer is not that of the model, or is encoded differently here; the model must not be served."""


def load_model(dialect: Dialect, source: str, vocabulary: Vocabulary) -> RecipeModel:
    """``source`` is the text of tokenizer.json. Raises ModelMismatch for one without the tokens of an answer."""
    try:
        tokenizer = recipe.Tokenizer.from_str(source)
    except RuntimeError as error:
        raise ModelMismatch(str(error)) from error
    ids = [_id(tokenizer, spelling) for spelling in (END_OF_TURN, THINK, THINK_END, DSML)]
    return RecipeModel(vocabulary, tokenizer, dialect.version, ControlTokens(*ids))


def verify(renderer: DeepseekRenderer, encoder: SegmentEncoder, tokenizer: recipe.Tokenizer) -> None:
    """Raises ModelMismatch where our ids are not recipe's."""
    reference = renderer.dialect.encoding.with_tokenizer(tokenizer)
    for conversation in _probes():
        try:
            expected = reference.encode(renderer.write(conversation))
        except RuntimeError as error:
            raise ModelMismatch(f"{error}. Is it the tokenizer of another model?") from error
        if encoder.encode(renderer.render(conversation, 0).segments) != expected:
            raise ModelMismatch("a probe conversation is encoded differently")


def _id(tokenizer: recipe.Tokenizer, spelling: str) -> int:
    ids = tokenizer.encode(spelling)
    if len(ids) != 1:
        raise ModelMismatch(f"it has no token {spelling}. Is it the tokenizer of another model?")
    return ids[0]


def _probes() -> Iterator[Conversation]:
    for is_on in (True, False):
        thinking = Thinking(is_on)
        yield Conversation(_MESSAGES[1:2], thinking=thinking)
        yield Conversation(_MESSAGES[:3], thinking=thinking, is_continued=True)
        yield Conversation(_MESSAGES, [_TOOL], thinking=thinking)
        yield Conversation(_MESSAGES, [_TOOL], ToolChoice(ToolMode.REQUIRED), thinking)
        yield Conversation(_MESSAGES[:4], thinking=thinking, answer_format=AnswerFormat({"const": END_OF_TURN}))
