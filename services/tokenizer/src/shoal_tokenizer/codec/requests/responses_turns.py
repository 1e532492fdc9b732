"""Responses, the request: items -> the messages of the one conversation.

What the model said in one go lies in several items (reasoning, text, calls); they are one assistant message again, as
the family's grammar wrote them. Texts of several parts or items are joined by an empty line.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal_tokenizer.codec.events.carried_reasoning import carried
from shoal_tokenizer.codec.requests.fields import invalid, unsupported
from shoal_tokenizer.codec.requests.responses_items import (
    Caller,
    Content,
    CustomCall,
    CustomOutput,
    FunctionCall,
    FunctionOutput,
    InputFile,
    InputImage,
    Item,
    Message,
    Part,
    ReasoningPassedBack,
    Refusal,
)
from shoal_tokenizer.codec.requests.tool_turns import MENDED_NOTE, pair_results, read_arguments

_BETWEEN_TEXTS = "\n\n"
_BETWEEN_THOUGHTS = "\n"
_FOREIGN = "input: reasoning that was encrypted by another server cannot be read here; it was left out."
_BROKEN_OFF = "input: a tool call that was cut off and has no output was left out."


def flat_name(namespace: str | None, name: str) -> str:
    """A tool of a namespace as model families see it."""
    return name if namespace is None else f"{namespace}::{name}"


@dataclass(slots=True)
class _Answer:
    """What the model said in one go; each list in its order."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] | None = None  # None: there is no item of reasoning
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> dict[str, Any] | None:
        """None when nothing was said."""
        message: dict[str, Any] = {"role": "assistant", "content": _BETWEEN_TEXTS.join(filter(None, self.texts))}
        if self.thoughts is not None:
            message["reasoning_content"] = _BETWEEN_THOUGHTS.join(filter(None, self.thoughts))
        if self.calls:
            message["tool_calls"] = self.calls
        is_empty = not (message["content"] or message.get("reasoning_content") or self.calls)
        return None if is_empty else message


class Turns:
    """Collects the items of one request; used once."""

    def __init__(self, instructions: str | None) -> None:
        self.notes: dict[str, None] = {}  # in order, each once
        self._said: list[tuple[dict[str, Any] | _Answer, str]] = []  # with its place in the body
        self._answered: set[str] = set()
        if instructions:
            self._said.append(({"role": "system", "content": instructions}, "instructions"))

    def add(self, items: Sequence[Item], places: Sequence[str]) -> None:
        """``places`` are where the items stand in the body, for errors."""
        self._answered |= {item.call_id for item in items if isinstance(item, FunctionOutput | CustomOutput)}
        for item, place in zip(items, places, strict=True):
            self._add(item, place)

    def messages(self) -> list[dict[str, Any]]:
        """BadRequest when calls and outputs do not fit each other."""
        messages, places = [], []
        for said, place in self._said:
            message = said.message() if isinstance(said, _Answer) else said
            if message is not None:
                messages.append(message)
                places.append(place)
        return pair_results(messages, lambda index: places[index])

    def _add(self, item: Item, place: str) -> None:
        if isinstance(item, Message):
            self._add_message(item, place)
        elif isinstance(item, ReasoningPassedBack):
            self._add_reasoning(item, place)
        elif isinstance(item, FunctionCall | CustomCall):
            self._add_call(item, place)
        else:
            _refuse_programs(item.caller, place)
            content = _text(item.output, f"{place}.output")
            self._said.append(({"role": "tool", "content": content, "tool_call_id": item.call_id}, place))

    def _add_message(self, item: Message, place: str) -> None:
        text = _text(item.content, f"{place}.content")
        if item.role == "assistant":
            self._answer(place).texts.append(text)
        else:
            self._said.append(({"role": "user" if item.role == "user" else "system", "content": text}, place))

    def _add_reasoning(self, item: ReasoningPassedBack, place: str) -> None:
        text = _BETWEEN_THOUGHTS.join(part.text for part in item.content or ())
        if not text and item.encrypted_content:
            read = carried(item.encrypted_content)
            if read is None:
                self.notes[_FOREIGN] = None
            text = read or ""
        answer = self._answer(place)
        if any(answer.texts) and not answer.calls:
            answer = self._new_answer(place)  # it thought again
        if answer.thoughts is None:
            answer.thoughts = []
        answer.thoughts.append(text)

    def _add_call(self, item: FunctionCall | CustomCall, place: str) -> None:
        _refuse_programs(item.caller, place)
        if item.is_async:
            raise unsupported("Asynchronous tool calls are not supported here.", f"{place}.async")
        if item.status == "incomplete" and item.call_id not in self._answered:
            self.notes[_BROKEN_OFF] = None
            return
        if isinstance(item, CustomCall):
            arguments: dict[str, Any] = {"input": item.input}
        else:
            arguments, is_mended = read_arguments(item.arguments)
            if is_mended:
                self.notes[MENDED_NOTE] = None
        function = {"name": flat_name(item.namespace, item.name), "arguments": arguments}
        self._answer(place).calls.append({"id": item.call_id, "type": "function", "function": function})

    def _answer(self, place: str) -> _Answer:
        """The one that is being put together."""
        last = self._said[-1][0] if self._said else None
        return last if isinstance(last, _Answer) else self._new_answer(place)

    def _new_answer(self, place: str) -> _Answer:
        answer = _Answer()
        self._said.append((answer, place))
        return answer


def _refuse_programs(caller: Caller | None, place: str) -> None:
    if caller is not None and caller.type != "direct":
        raise unsupported("Only tool calls of the model itself are supported here.", f"{place}.caller")


def _text(content: Content, place: str) -> str:
    if isinstance(content, str):
        return content
    return _BETWEEN_TEXTS.join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: Part, place: str) -> str:
    if isinstance(part, InputImage | InputFile):
        kind = str(part.__struct_config__.tag)
        raise unsupported(f"This model takes text only, not '{kind}'.", place)
    return part.refusal if isinstance(part, Refusal) else part.text


def refuse_silence(messages: list[dict[str, Any]]) -> None:
    """BadRequest when there is nothing to answer."""
    if all(message["role"] == "system" for message in messages):
        raise invalid("'input' must hold something to answer: a text, or at least one item.", "input")
