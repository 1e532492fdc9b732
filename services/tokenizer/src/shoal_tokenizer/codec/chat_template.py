"""Any model with a Hugging Face chat template: conversation -> prompt, by the template alone.

What a template can show is found out by probing it once at load: a conversation part whose text does not appear in
the prompt (tools in a template without tools) is refused, not dropped. The same probes compare our ids with the
reference tokenizer's, so a model that we would encode differently does not start.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jinja2

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1.common_pb2 import INVALID_REQUEST, UNSUPPORTED
from shoal_tokenizer.codec.api import Conversation, Segment, SegmentEncoder
from shoal_tokenizer.codec.encoder import Markers
from shoal_tokenizer.codec.prompt_text import ChatTemplateEnvironment, PromptText, TemplateRefusal

# What templates raise on shapes that they were not written for, beside Jinja's own errors.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)

# A role is one of these four, not something a caller can spell; some templates build control tokens around it.
_ROLES = {name: PromptText.of_author(name) for name in ("system", "user", "assistant", "tool")}

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "probe"}}},
    },
}
_SYSTEM = {"role": "system", "content": "Probe system."}
_USER = {"role": "user", "content": "Probe user: 12 × 30 = 360?\n\nüñí 你好"}
_ASSISTANT = {"role": "assistant", "content": "Probe assistant."}
_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "probe0001", "type": "function", "function": {"name": "probe_call", "arguments": {"city": "Probeville"}}}
    ],
}
_RESULT = {"role": "tool", "content": "Probe reading.", "tool_call_id": "probe0001", "name": "probe_call"}


class ModelMismatch(Exception):
    """Our reading of the model's files gives another prompt than the reference; the model must not be served."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """Which optional parts of a conversation the template puts into the prompt."""

    has_system: bool
    has_tools: bool
    has_tool_results: bool


class ChatTemplate:
    """``PromptRenderer`` of one model; used by many threads at once."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], markers: Markers) -> None:
        environment = ChatTemplateEnvironment()
        self._template = environment.from_string(source)
        self._special_tokens = {name: PromptText.of_author(text) for name, text in special_tokens.items()}
        self._markers = markers
        self.abilities = Abilities(
            has_system=self._shows([_SYSTEM, _USER], None, "Probe system."),
            has_tools=self._shows([_USER], [_TOOL], "probe_tool"),
            has_tool_results=self._shows([_USER, _CALL, _RESULT], [_TOOL], "probe_call", "Probeville", "Probe reading"),
        )

    def render(self, conversation: Conversation, now_s: int) -> list[Segment]:
        self._refuse_what_is_not_shown(conversation)
        return self._markers.cut(self.render_text(conversation, now_s))

    def render_text(self, conversation: Conversation, now_s: int) -> PromptText:
        """The prompt, as ``apply_chat_template(tokenize=False, add_generation_prompt=True)`` gives it."""
        try:
            text = self._template.render(
                messages=[{**message, "role": _ROLES[message["role"]]} for message in conversation.messages],
                tools=conversation.tools,
                documents=None,
                add_generation_prompt=True,
                strftime_now=lambda form: datetime.fromtimestamp(now_s, UTC).strftime(form),
                **self._special_tokens,
            )
        except TemplateRefusal as refusal:
            raise BadRequest(
                INVALID_REQUEST,
                f"The model's chat template refuses this conversation: {refusal}",
                param="messages",
            ) from None
        except _TEMPLATE_ERRORS as error:
            raise BadRequest(
                UNSUPPORTED,
                "The model's chat template cannot show this conversation. Leave out tools and tool messages, "
                "and let user and assistant messages alternate.",
                param="messages",
            ) from error
        assert isinstance(text, PromptText)
        return text

    def probes(self) -> Iterator[Conversation]:
        """Conversations without control tokens that the template accepts."""
        candidates = [
            Conversation([_USER]),
            Conversation([_SYSTEM, _USER]),
            Conversation([_USER, _ASSISTANT, _USER]),
            Conversation([_USER], [_TOOL]),
            Conversation([_USER, _CALL, _RESULT], [_TOOL]),
        ]
        for conversation in candidates:
            try:
                self.render(conversation, 0)
            except BadRequest:
                continue
            yield conversation

    def _shows(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *words: str) -> bool:
        try:
            text = self.render_text(Conversation(messages, tools), 0)
        except BadRequest:
            return False
        return all(word in text for word in words)

    def _refuse_what_is_not_shown(self, conversation: Conversation) -> None:
        if conversation.tools and not self.abilities.has_tools:
            raise BadRequest(UNSUPPORTED, "This model's chat template has no tools.", param="tools")
        for index, message in enumerate(conversation.messages):
            if message["role"] == "system" and not self.abilities.has_system:
                text = "This model's chat template has no system messages. Put the text into the first user message."
                raise BadRequest(UNSUPPORTED, text, param=f"messages[{index}].role")
            if (message["role"] == "tool" or message.get("tool_calls")) and not self.abilities.has_tool_results:
                text = "This model's chat template has no tool calls."
                raise BadRequest(UNSUPPORTED, text, param=f"messages[{index}]")


def verify(template: ChatTemplate, encoder: SegmentEncoder, reference: Callable[[str], Sequence[int]]) -> int:
    """Compare with ``reference`` (prompt -> ids) on all probes; returns how many there were."""
    count = 0
    for conversation in template.probes():
        text = str.__str__(template.render_text(conversation, 0))
        ours = encoder.encode(template.render(conversation, 0))
        if ours != list(reference(text)):
            raise ModelMismatch(f"the prompt of {len(conversation.messages)} probe messages is encoded differently")
        count += 1
    if count == 0:
        raise ModelMismatch("the chat template refuses every probe conversation")
    return count
