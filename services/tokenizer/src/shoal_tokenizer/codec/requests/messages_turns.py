"""Messages, the request: system text and messages -> those of the one conversation.

Turns of one role in a row are one turn. In a turn of the user results come before text, as they do in every family's
grammar. What the model thought comes back as the reasoning of its message, from the text or, where the client left
that out, from the signature.
"""

from collections.abc import Sequence
from typing import Any

from shoal_tokenizer.codec.events.carried_reasoning import carried
from shoal_tokenizer.codec.requests.fields import invalid, unsupported
from shoal_tokenizer.codec.requests.messages_body import (
    Block,
    Message,
    RedactedBlock,
    RefusedBlock,
    ResultPart,
    TextBlock,
    ThinkingBlock,
    ToolResult,
    ToolUse,
)
from shoal_tokenizer.codec.requests.tool_turns import pair_results

_BETWEEN = "\n\n"
_BILLING = "x-anthropic-billing-header:"
_ERROR = "Error: "


class Turns:
    """``messages`` of the conversation, whether the answer goes on with the last of them, and notes."""

    def __init__(self, system: str | Sequence[TextBlock] | None, messages: Sequence[Message], drops_billing: bool):
        self.notes: list[str] = []
        self._places: list[str] = []  # of each message in the body
        self.messages: list[dict[str, Any]] = []
        if text := self._system(system, drops_billing):
            self._add({"role": "system", "content": text}, "system")
        for index, message in enumerate(messages):
            self._take(message, f"messages[{index}]")
        self.is_continued = self._continues()
        self.messages = pair_results(self.messages, lambda index: self._places[index])

    def _system(self, system: str | Sequence[TextBlock] | None, drops_billing: bool) -> str:
        texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
        if drops_billing and texts and texts[0].startswith(_BILLING):
            # Its value changes with every request: in the prompt it would make every prefix a new one.
            texts[0] = texts[0].partition("\n")[2]
            self.notes.append("system: the billing line was left out, so that it does not change the prefix")
        return _BETWEEN.join(text for text in texts if text)

    def _take(self, message: Message, where: str) -> None:
        content = message.content
        blocks = [TextBlock(content)] if isinstance(content, str) else content
        if message.role == "assistant":
            self._assistant(blocks, where)
        else:
            self._other(message.role, blocks, where)

    def _other(self, role: str, blocks: Sequence[Block], where: str) -> None:
        texts: list[str] = []
        for index, block in enumerate(blocks):
            place = f"{where}.content[{index}]"
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolResult) and role == "user":
                if texts:
                    raise invalid("Tool results come first in the content of a message.", place)
                self._add(_result(block, place), place)
            else:
                raise _refusal(block, role, place)
        if texts or not blocks:
            self._add_text(role, _BETWEEN.join(texts), where)

    def _add_text(self, role: str, text: str, where: str) -> None:
        if self.messages and self.messages[-1]["role"] == role and role == "user":
            self.messages[-1]["content"] += _BETWEEN + text
        else:
            self._add({"role": role, "content": text}, where)

    def _assistant(self, blocks: Sequence[Block], where: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": ""}, where)
        for index, block in enumerate(blocks):
            self._add_to_answer(self.messages[-1], block, f"{where}.content[{index}]")

    def _add_to_answer(self, answer: dict[str, Any], block: Block, where: str) -> None:
        if isinstance(block, TextBlock):
            answer["content"] += (_BETWEEN if answer["content"] else "") + block.text
        elif isinstance(block, ThinkingBlock):
            reasoning = block.thinking or carried(block.signature) or ""
            answer["reasoning_content"] = answer.get("reasoning_content", "") + reasoning
        elif isinstance(block, ToolUse):
            call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            answer.setdefault("tool_calls", []).append(call)
        elif isinstance(block, RedactedBlock):
            self.notes.append(f"{where}: redacted thinking of another server was left out")
        else:
            raise _refusal(block, "assistant", where)

    def _continues(self) -> bool:
        last = self.messages[-1]
        if last["role"] != "assistant" or last.get("tool_calls"):
            return False
        if last["content"] != last["content"].rstrip():
            raise invalid("The last message of the assistant must not end with white space.", self._places[-1])
        return True

    def _add(self, message: dict[str, Any], where: str) -> None:
        self.messages.append(message)
        self._places.append(where)


def _result(block: ToolResult, where: str) -> dict[str, Any]:
    content = block.content
    if content is None or isinstance(content, str):
        text = content or ""
    else:
        text = _BETWEEN.join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    if block.is_error and "error" not in text[:80].lower():
        text = _ERROR + text  # templates have no other place for it
    return {"role": "tool", "content": text, "tool_call_id": block.tool_use_id}


def _part(part: ResultPart, where: str) -> str:
    if isinstance(part, TextBlock):
        return part.text
    raise _refusal(part, "user", where)


def _refusal(block: Block | ResultPart, role: str, where: str) -> Exception:
    kind = str(block.__struct_config__.tag)
    if isinstance(block, RefusedBlock):
        return unsupported(f"Blocks of type '{kind}' are not supported here. {block.instead}", f"{where}.type")
    return invalid(f"A message of role '{role}' has no blocks of type '{kind}'.", f"{where}.type")
