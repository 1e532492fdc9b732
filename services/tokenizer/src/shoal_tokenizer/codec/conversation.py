"""The one conversation: what the three APIs are turned into and every model family renders.

Messages are in the form that chat templates read:

    {"role": "system" | "user", "content": str}
    {"role": "assistant", "content": str, "reasoning_content": str?, "tool_calls": [CALL, ...]?}
    {"role": "tool", "content": str, "tool_call_id": str, "name": str?}
    CALL = {"id": str, "type": "function", "function": {"name": str, "arguments": dict}}

Tools are ``{"type": "function", "function": {"name", "description"?, "parameters"?, "strict"?}}``. Every tool message
answers a call of the assistant message before it; converters check that and sort results into the order of the calls.
"""

import enum
from dataclasses import dataclass, field, replace
from typing import Any


class ToolMode(enum.Enum):
    """Whether the model may, or must, call tools."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``names``: only these may be called; None: all that are given. All given tools stay in the prompt, so that a
    choice does not break the prefix."""

    mode: ToolMode = ToolMode.AUTO
    names: tuple[str, ...] | None = None
    is_single: bool = False  # at most one call in an answer


class Effort(enum.Enum):
    """How much a model should think, in the words that the APIs share; a family takes the nearest it knows."""

    MINIMAL = "minimal"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    XHIGH = "xhigh"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Thinking:
    """None: the model's own default."""

    is_on: bool | None = None
    effort: Effort | None = None


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What the text of the answer must be: JSON of ``schema``, a text of ``regex``; with neither, any JSON object."""

    schema: dict[str, Any] | bool | None = None
    regex: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is put into the prompt, and what the caller wants of the answer beyond sampling."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    thinking: Thinking = field(default_factory=Thinking)
    answer_format: AnswerFormat | None = None
    is_continued: bool = False  # the last message is the assistant's, and the answer goes on with it


@dataclass(frozen=True, slots=True)
class RawText:
    """A prompt without a conversation: text that the model goes on with."""

    text: str


FORMAT_NOTE = "the format of the answer is not enforced where the answer goes on with a given text"


def without_format_of_begun(conversation: Conversation) -> tuple[Conversation, tuple[str, ...]]:
    """Of a text that was begun it is not known what of the format is still to come: it is left out, and noted."""
    if conversation.answer_format is None or not conversation.is_continued or not conversation.messages[-1]["content"]:
        return conversation, ()
    return replace(conversation, answer_format=None), (FORMAT_NOTE,)
