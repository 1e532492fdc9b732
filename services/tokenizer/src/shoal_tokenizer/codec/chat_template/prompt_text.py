"""Rendering a chat template while keeping apart what the template wrote and what the caller typed.

Everything that the template's author wrote (its text, its string constants, the model's own special tokens) is a
``PromptText`` that knows which of its characters that is. All other strings are plain, and plain means: typed by
someone. The operations by which templates put prompts together keep the knowledge; every other one (``format``,
``replace``, a filter that we never heard of) returns a plain string. So a mistake loses a control token, which the
probes at load see, and never makes one out of a caller's text. The values are real strings throughout: conditions,
slices and filters do what they do in the reference implementation.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, TypeAlias

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Ranges: TypeAlias = tuple[tuple[int, int], ...]


class PromptText(str):
    """A string and the ascending, separate ranges of it that the template's author wrote."""

    __slots__ = ("ranges",)
    ranges: Ranges

    def __new__(cls, value: str = "", ranges: Ranges = ()) -> "PromptText":
        text = super().__new__(cls, value)
        text.ranges = ranges
        return text

    @classmethod
    def of_author(cls, value: str) -> "PromptText":
        """A text that the template's author wrote all of."""
        return cls(value, ((0, len(value)),) if value else ())

    def __str__(self) -> str:
        return self  # Jinja writes str(value); the ranges must get through

    def __add__(self, other: str) -> "PromptText":
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> "PromptText":
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if not isinstance(key, slice):
            return super().__getitem__(key)
        start, stop, step = key.indices(len(self))
        return self._part(start, stop) if step == 1 else super().__getitem__(key)

    def strip(self, chars: str | None = None, /) -> "PromptText":
        return self.rstrip(chars).lstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> "PromptText":
        return self._part(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> "PromptText":
        return self._part(0, len(super().rstrip(chars)))

    def join(self, parts: Iterable[str], /) -> "PromptText":
        between: list[str] = []
        for part in parts:
            between += (self, part)
        return concat(between[1:])

    def _part(self, start: int, stop: int) -> "PromptText":
        cut = ((max(a, start) - start, min(b, stop) - start) for a, b in self.ranges if a < stop and b > start)
        return PromptText(super().__getitem__(slice(start, stop)), tuple(cut))


def concat(parts: Iterable[object]) -> PromptText:
    """Join as ``"".join`` does, and the ranges with it."""
    texts = [part if isinstance(part, str) else str(part) for part in parts]
    ranges: list[tuple[int, int]] = []
    end = 0
    for text in texts:
        for a, b in text.ranges if isinstance(text, PromptText) else ():
            if ranges and ranges[-1][1] == end + a:
                ranges[-1] = (ranges[-1][0], end + b)
            else:
                ranges.append((end + a, end + b))
        end += len(text)
    return PromptText("".join(texts), tuple(ranges))


class _AuthorMarkingGenerator(CodeGenerator):
    """Compiles string constants of a template to ``PromptText``."""

    environment: "ChatTemplateEnvironment"

    def _author_text(self, value: str) -> str:
        constants = self.environment.constants
        constants.append(PromptText.of_author(value))
        return f"environment.constants[{len(constants) - 1}]"

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._author_text("".join(map(str, group)))

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(self._author_text(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write("))")


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's own text for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it this way

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class ChatTemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face's ``apply_chat_template`` sets it up; one environment holds one template."""

    code_generator_class = _AuthorMarkingGenerator
    concat = staticmethod(concat)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.constants: list[PromptText] = []
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    pair = (separators[0], separators[1]) if separators else None
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(str(message))


class TemplateRefusal(TemplateError):
    """The template itself refused the conversation; its author wrote the message."""
