"""Plays: what a scripted engine answers to which end of a DeepSeek prompt, so that a whole agent loop can be played.

A cue is the text of one whole turn of the user, or of one whole tool result; in the prompt it lies between control
tokens, so its ids are always the same. An answer is written as the model writes it, control tokens spelled out.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import fastokens

DSML = "｜DSML｜"
THINK_END = "</think>"
_CONTROL = (DSML, THINK_END)


@dataclass(frozen=True, slots=True)
class Line:
    """``cue`` is what stands last in the prompt, ``answer`` what the model says to it.

    ``is_spelled``: control tokens of the answer are spelled with ordinary ones, as a model does that quotes them.
    """

    cue: str
    answer: str
    is_spelled: bool = False


def result_cue(content: str) -> str:
    """The cue of a single tool result."""
    return f"<tool_result>{content}</tool_result>"


def call(name: str, **arguments: object) -> str:
    """A tool call in the grammar of DeepSeek V4."""
    return calls((name, arguments))


def calls(*called: tuple[str, dict[str, object]]) -> str:
    """Several tool calls of one answer."""
    blocks = []
    for name, arguments in called:
        lines = [f'<{DSML}invoke name="{name}">']
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            shown = value if is_text else json.dumps(value)
            flag = "true" if is_text else "false"
            lines.append(f'<{DSML}parameter name="{key}" string="{flag}">{shown}</{DSML}parameter>')
        blocks.append("\n".join([*lines, f"</{DSML}invoke>"]))
    return f"\n\n<{DSML}tool_calls>\n" + "\n".join(blocks) + f"\n</{DSML}tool_calls>"


def write_script(path: Path, tokenizer_file: Path, lines: Iterable[Line]) -> Path:
    """The file that a scripted engine plays from."""
    tokenizer = fastokens.Tokenizer.from_file(str(tokenizer_file))

    def encode(text: str, *, has_control: bool) -> list[int]:
        return list(tokenizer.encode_segments(_cut(text) if has_control else [(text, False)]).ids)

    path.write_text(
        "".join(
            json.dumps(
                {
                    "after": encode(line.cue, has_control=False),
                    "answer": encode(line.answer, has_control=not line.is_spelled),
                }
            )
            + "\n"
            for line in lines
        )
    )
    return path


def _cut(text: str) -> list[tuple[str, bool]]:
    segments = [(text, False)]
    for mark in _CONTROL:
        cut: list[tuple[str, bool]] = []
        for part, is_control in segments:
            pieces = [part] if is_control else part.split(mark)
            for number, piece in enumerate(pieces):
                cut += [(mark, True)] if number else []
                cut += [(piece, is_control)] if piece else []
        segments = cut
    return segments
