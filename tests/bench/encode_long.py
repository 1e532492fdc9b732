"""Encoding a long conversation of an agent with DeepSeek's codec, against deepseek-recipe's own encoding.

The conversation is 77,000 tokens in 41 messages: tools, calls, and results that are program texts. Cold: no piece of
it was seen before. Warm: it comes again, one turn longer, as an agent's does.
"""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
from rows import Row

from shoal_testkit.deepseek_tokenizer import write_v4
from shoal_tokenizer.codec.api import Codec
from shoal_tokenizer.codec.conversation import Conversation
from shoal_tokenizer.codec.deepseek.renderer import DeepseekRenderer
from shoal_tokenizer.model_files import load_codec

MESSAGES = 41
TOKENS = 77_000
CHARS_A_RESULT = 14_950  # makes that many tokens
ROUNDS = 15
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "The text of a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
_WORDS = [
    "self",
    "return",
    "value",
    "index",
    "for",
    "in",
    "range",
    "if",
    "not",
    "None",
    "tokens",
    "state",
    "block",
    "request",
    "answer",
    "def",
    "class",
    "import",
]


def measure() -> list[Row]:
    """A B C in this process, rounds of texts that nobody has seen."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_v4(Path(name))
        codec = load_codec(folder, "deepseek", 64)
        tokenizer = recipe.Tokenizer.from_file(str(folder / "tokenizer.json"))
    renderer = codec.renderer
    assert isinstance(renderer, DeepseekRenderer)
    encoding = recipe.DeepseekV4Encoding().with_tokenizer(tokenizer)
    recipes: list[float] = []
    cold: list[float] = []
    warm: list[float] = []
    counts: list[int] = []
    for n in range(ROUNDS):
        conversation, longer = _agent(n, MESSAGES), _agent(n, MESSAGES + 2)
        cold.append(_cpu_ms(lambda asked=conversation: counts.append(len(_encode(codec, asked)))))
        warm.append(_cpu_ms(lambda asked=longer: _encode(codec, asked)))
        recipes.append(_cpu_ms(lambda asked=conversation: encoding.encode(renderer.write(asked))))
    case = f"{round(sum(counts) / len(counts), -2):.0f} tokens"
    return [
        Row("encode_long", case, "deepseek-recipe", "CPU ms", tuple(recipes), is_baseline=True),
        Row("encode_long", case, "cold", "CPU ms", tuple(cold)),
        Row("encode_long", case, "warm, one turn longer", "CPU ms", tuple(warm)),
    ]


def _encode(codec: Codec, conversation: Conversation) -> list[int]:
    return codec.encoder.encode(codec.renderer.render(conversation, 0).segments)


def _cpu_ms(work: Callable[[], Any]) -> float:
    began_s = time.process_time()
    work()
    return 1e3 * (time.process_time() - began_s)


def _agent(seed: int, messages: int) -> Conversation:
    """System, user, then calls and their results; equal seeds begin alike."""
    dice = random.Random(seed)
    said: list[dict[str, Any]] = [
        {"role": "system", "content": f"You are agent {seed}. " + _program(dice, 6000)},
        {"role": "user", "content": f"Task {seed}: mend the tests. " + _program(dice, 400)},
    ]
    while len(said) < messages:
        call_id = f"call_{len(said)}"
        path = f"src/{dice.randrange(10**6)}.py"
        call = {"id": call_id, "type": "function", "function": {"name": "read_file", "arguments": {"path": path}}}
        reasoning = f"I have to look at {path} first."
        said += [
            {"role": "assistant", "content": "", "reasoning_content": reasoning, "tool_calls": [call]},
            {"role": "tool", "content": _program(dice, CHARS_A_RESULT), "tool_call_id": call_id, "name": "read_file"},
        ]
    return Conversation(said[:messages], [TOOL])


def _program(dice: random.Random, chars: int) -> str:
    """Lines in the manner of a program; no two texts are alike."""
    lines: list[str] = []
    length = 0
    while length < chars:
        words = " ".join(dice.choice(_WORDS) for _ in range(dice.randrange(3, 9)))
        lines.append(f"{'    ' * dice.randrange(4)}{words}_{dice.randrange(10**5)}({dice.randrange(100)}):")
        length += len(lines[-1]) + 1
    return "\n".join(lines)
