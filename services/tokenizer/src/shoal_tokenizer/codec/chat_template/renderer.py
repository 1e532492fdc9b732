"""Any model with a Hugging Face chat template: conversation -> prompt, by the template alone.

What a template can show is found out by probing it once at load: a conversation part whose text does not appear in
the prompt (tools in a template without tools) is refused, not dropped; a wish that it does not know is told in a note.
The same probes compare our ids with the reference tokenizer's, so a model that we would encode differently does not
start.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1.common_pb2 import INVALID_REQUEST, UNSUPPORTED
from shoal_tokenizer.codec.api import AnswerStart, Rendered, Segment, SegmentEncoder
from shoal_tokenizer.codec.chat_template import probes
from shoal_tokenizer.codec.chat_template.abilities import find_abilities
from shoal_tokenizer.codec.chat_template.constraint import wants_calls_bound, write_constraint
from shoal_tokenizer.codec.chat_template.markers import Markers
from shoal_tokenizer.codec.chat_template.prompt_text import ChatTemplateEnvironment, PromptText, TemplateRefusal
from shoal_tokenizer.codec.chat_template.tool_texts import text_parameters
from shoal_tokenizer.codec.conversation import Conversation, ToolMode, without_format_of_begun

# What templates raise on shapes that they were not written for, beside Jinja's own errors.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)

# A role is one of these four, not something a caller can spell; some templates build control tokens around it.
_ROLES = {name: PromptText.of_author(name) for name in ("system", "user", "assistant", "tool")}

# Put behind the text that an answer goes on with, to find its end in the prompt; as transformers does it.
_CONTINUED = "SHOAL_ANSWER_GOES_ON_HERE "


class ModelMismatch(Exception):
    """Our reading of the model's files gives another prompt than the reference; the model must not be served."""


class ChatTemplate:
    """``PromptRenderer`` of one model; used by many threads at once."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], markers: Markers) -> None:
        environment = ChatTemplateEnvironment()
        self._template = environment.from_string(source)
        self._special_tokens = {name: PromptText.of_author(text) for name, text in special_tokens.items()}
        self._markers = markers
        self.abilities = find_abilities(source, self._try, markers)

    def render(self, conversation: Conversation, now_s: int) -> Rendered:
        self._refuse_what_is_not_shown(conversation)
        conversation, format_notes = without_format_of_begun(conversation)
        formats = self.abilities.formats
        thinks = formats.reasoning is not None
        variables, notes = self.abilities.thinking.choose(conversation.thinking, thinks)
        prompt = self.render_text(conversation, now_s, variables)
        start, may_reason = AnswerStart.TEXT, False
        if formats.reasoning is not None:
            if formats.reasoning.is_opened_by(prompt):
                start = AnswerStart.REASONING
            elif not conversation.is_continued:
                may_reason = not formats.reasoning.is_closed_by(prompt)
        needs_tools = formats.calls is not None and formats.calls.needs_tools
        if formats.calls is None and wants_calls_bound(conversation):
            notes += ("tools: how this model writes calls is not known, so they come as text, without any constraint",)
        notes += format_notes
        return Rendered(
            self._markers.cut(prompt),
            start=start,
            text_parameters=text_parameters(conversation.tools or ()) if needs_tools else {},
            constraint=write_constraint(conversation, formats, start, may_reason=may_reason),
            notes=notes,
        )

    def render_raw(self, text: str) -> list[Segment]:
        return [(text, False)]

    def render_text(
        self, conversation: Conversation, now_s: int, variables: Mapping[str, Any] | None = None
    ) -> PromptText:
        """The prompt, as ``apply_chat_template(tokenize=False)`` gives it, up to where the answer begins."""
        try:
            if conversation.is_continued:
                return self._render_continued(conversation, now_s, variables or {})
            return self._render(conversation.messages, conversation.tools, now_s, variables or {})
        except TemplateRefusal as refusal:
            raise BadRequest(
                INVALID_REQUEST,
                f"The model's chat template refuses this conversation: {refusal}",
                param="messages",
            ) from None
        except RecursionError:
            raise BadRequest(
                INVALID_REQUEST, "Tools or arguments of calls are nested too deeply.", param="messages"
            ) from None
        except _TEMPLATE_ERRORS as error:
            raise BadRequest(
                UNSUPPORTED,
                "The model's chat template cannot show this conversation. Leave out tools and tool messages, "
                "and let user and assistant messages alternate.",
                param="messages",
            ) from error

    def probes(self) -> Iterator[Conversation]:
        """Conversations without control tokens that the template accepts."""
        call = probes.call_message()
        reasoned = {**probes.ASSISTANT, "reasoning_content": probes.REASONING}
        candidates = [
            Conversation([probes.USER]),
            Conversation([probes.SYSTEM, probes.USER]),
            Conversation([probes.USER, probes.ASSISTANT, probes.USER]),
            Conversation([probes.USER, reasoned, probes.USER]),
            Conversation([probes.USER], [probes.TOOL]),
            Conversation([probes.USER, call, probes.RESULT], [probes.TOOL]),
        ]
        for conversation in candidates:
            try:
                self.render(conversation, 0)
            except BadRequest:
                continue
            yield conversation

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        now_s: int,
        variables: Mapping[str, Any],
        begins_answer: bool = True,
    ) -> PromptText:
        text = self._template.render(
            messages=[{**message, "role": _ROLES[message["role"]]} for message in messages],
            tools=[_as_shown(tool) for tool in tools] if tools is not None else None,
            documents=None,
            add_generation_prompt=begins_answer,
            strftime_now=lambda form: datetime.fromtimestamp(now_s, UTC).strftime(form),
            **self._special_tokens,
            **variables,
        )
        assert isinstance(text, PromptText)
        return text

    def _render_continued(self, conversation: Conversation, now_s: int, variables: Mapping[str, Any]) -> PromptText:
        """Up to the end of the last message's text, without what the template closes a turn with."""
        *before, last = conversation.messages
        if not last["content"].strip() and not last.get("reasoning_content"):
            return self._render(before, conversation.tools, now_s, variables)
        messages = [*before, {**last, "content": last["content"] + _CONTINUED}]
        prompt = self._render(messages, conversation.tools, now_s, variables, False)
        mark = _CONTINUED.rstrip()
        place = prompt.rfind(mark)
        if place < 0:
            raise TemplateRefusal("it does not show the last message, so the answer cannot go on with it")
        is_kept = prompt.startswith(_CONTINUED, place)
        text = prompt[:place]
        assert isinstance(text, PromptText)
        return text if is_kept else text.rstrip()

    def _try(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        begins_answer: bool,
    ) -> PromptText | None:
        try:
            return self._render(messages, tools, 0, variables, begins_answer)
        except (*_TEMPLATE_ERRORS, RecursionError):
            return None

    def _refuse_what_is_not_shown(self, conversation: Conversation) -> None:
        if conversation.tools and not self.abilities.has_tools:
            raise BadRequest(UNSUPPORTED, "This model's chat template has no tools.", param="tools")
        if conversation.tool_choice.mode is ToolMode.REQUIRED and self.abilities.formats.calls is None:
            text = "How this model writes tool calls is not known, so none can be required. Use 'auto'."
            raise BadRequest(UNSUPPORTED, text, param="tool_choice")
        for index, message in enumerate(conversation.messages):
            if message["role"] == "system" and not self.abilities.has_system:
                text = "This model's chat template has no system messages. Put the text into the first user message."
                raise BadRequest(UNSUPPORTED, text, param=f"messages[{index}].role")
            if (message["role"] == "tool" or message.get("tool_calls")) and not self.abilities.has_tool_results:
                text = "This model's chat template has no tool calls."
                raise BadRequest(UNSUPPORTED, text, param=f"messages[{index}]")


def _as_shown(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as templates know it: whether it is strict is the engine's matter, and must not change the prompt."""
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


def verify(template: ChatTemplate, encoder: SegmentEncoder, reference: Callable[[str], Sequence[int]]) -> int:
    """Compare with ``reference`` (prompt -> ids) on all probes; returns how many there were."""
    count = 0
    for conversation in template.probes():
        text = str.__str__(template.render_text(conversation, 0))
        ours = encoder.encode(template.render(conversation, 0).segments)
        if ours != list(reference(text)):
            raise ModelMismatch(f"the prompt of {len(conversation.messages)} probe messages is encoded differently")
        count += 1
    if count == 0:
        raise ModelMismatch("the chat template refuses every probe conversation")
    return count
