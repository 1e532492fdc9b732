"""DeepSeek's models: conversation -> prompt, by deepseek-recipe.

recipe says which ranges of the prompt are control tokens; all other text is encoded without them. Of its ranges eight
spellings are left out: markers of places in an image, which recipe takes from assistant messages as if the model had
written them. Here the caller writes those messages too, and what a caller writes never becomes a control token.
docs/decisions/0031-one-conversation-between-apis-and-families.md
"""

from collections.abc import Iterator

import deepseek_recipe as recipe

from shoal_tokenizer.codec.api import AnswerStart, Rendered, Segment
from shoal_tokenizer.codec.conversation import Conversation, Thinking, ToolMode, without_format_of_begun
from shoal_tokenizer.codec.deepseek.constraint import write_constraint
from shoal_tokenizer.codec.deepseek.dialects import BEGIN_OF_TEXT, EFFORTS, THINK, ControlTokens, Dialect
from shoal_tokenizer.codec.deepseek.prompts import write_conversation

_GROUNDING = frozenset(f"<｜{slash}{name}｜>" for name in ("ref", "box", "point", "polygon") for slash in ("", "/"))


class DeepseekRenderer:
    """``PromptRenderer`` of one model; used by many threads at once."""

    def __init__(self, dialect: Dialect, tokens: ControlTokens) -> None:
        self.dialect = dialect
        self._tokens = tokens

    def write(self, conversation: Conversation) -> recipe.Conversation:
        """The same for recipe. BadRequest for what it cannot hold."""
        return write_conversation(conversation, thinks=_thinks(conversation), opens_calls=_opens_calls(conversation))

    def render(self, conversation: Conversation, now_s: int) -> Rendered:
        dialect = self.dialect
        thinks = _thinks(conversation)
        prompt = dialect.encoding.render_conversation(self.write(conversation))
        start = AnswerStart.CALLS if _opens_calls(conversation) else _start(prompt)
        notes = _effort_notes(conversation.thinking, thinks=thinks)
        conversation, format_notes = without_format_of_begun(conversation)
        return Rendered(
            list(_segments(prompt)),
            start=start,
            constraint=write_constraint(conversation, dialect, self._tokens, start),
            fixed=dialect.fixed_sampling(thinks=thinks, has_tools=bool(conversation.tools)),
            least=dialect.least_sampling(thinks=thinks),
            notes=notes + format_notes,
        )

    def render_raw(self, text: str) -> list[Segment]:
        return [(BEGIN_OF_TEXT, True), (text, False)]


def _thinks(conversation: Conversation) -> bool:
    return conversation.thinking.is_on is not False


def _opens_calls(conversation: Conversation) -> bool:
    """Whether the prompt goes as far as into the block of calls; a model that thinks has to do that first."""
    is_required = bool(conversation.tools) and conversation.tool_choice.mode is ToolMode.REQUIRED
    return is_required and not _thinks(conversation) and not conversation.is_continued


def _segments(prompt: recipe.RenderedPrompt) -> Iterator[Segment]:
    text, at = prompt.prompt, 0
    for start, end in prompt.special_ranges:
        if text[start:end] in _GROUNDING:
            continue
        if start > at:
            yield text[at:start], False
        yield text[start:end], True
        at = end
    if at < len(text):
        yield text[at:], False


def _start(prompt: recipe.RenderedPrompt) -> AnswerStart:
    """The prompt opens the reasoning where its last control token does."""
    start, end = next(
        range_ for range_ in reversed(prompt.special_ranges) if prompt.prompt[slice(*range_)] not in _GROUNDING
    )
    return AnswerStart.REASONING if prompt.prompt[start:end] == THINK else AnswerStart.TEXT


def _effort_notes(thinking: Thinking, *, thinks: bool) -> tuple[str, ...]:
    effort = thinking.effort
    if effort is None:
        return ()
    if not thinks:
        return ("effort: thinking is off, so it has no effect",)
    shown = EFFORTS[effort][1]
    if shown is effort:
        return ()
    return (f"effort: '{effort.value}' is not known to this model, '{shown.value}' was taken",)
