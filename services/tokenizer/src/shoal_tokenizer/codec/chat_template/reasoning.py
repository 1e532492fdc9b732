"""How a model shows where its reasoning begins and ends, found in its template.

The template's own way of writing reasoning of the history is the first witness, then a prompt that it ends with an
opened mark, then a mark that it cuts history at. White space that the template writes beside the marks belongs to
them, so that a turn of the history renders to what was generated.
"""

import re
from dataclasses import dataclass

from shoal_tokenizer.codec.chat_template.markers import Markers
from shoal_tokenizer.codec.chat_template.probes import ANSWER, REASONING
from shoal_tokenizer.codec.chat_template.prompt_text import PromptText
from shoal_tokenizer.codec.chat_template.tag import Tag

_NAME = r"[^<>\[\]\s/]+"
_SHOWN = re.compile(
    rf"(?P<open><{_NAME}>|\[{_NAME}\])(?P<space>\s*){re.escape(REASONING)}"
    rf"(?P<close_space>\s*)(?P<close></?{_NAME}>|\[/{_NAME}\])(?:(?P<after>\s*){re.escape(ANSWER)})?"
)
_CUT_AT = re.compile(r"</think>")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """``open space REASONING close_space close after ANSWER``."""

    open: Tag
    close: Tag
    space: str = "\n"
    close_space: str = "\n"
    after: str = "\n\n"

    def is_opened_by(self, prompt: PromptText) -> bool:
        """Whether the template's author ended the prompt with the opening mark."""
        return _ends_by_author(prompt, self.open.text)

    def is_closed_by(self, prompt: PromptText) -> bool:
        """Whether the author ended it with reasoning that is over: the model is not to think."""
        return _ends_by_author(prompt, self.close.text)


def _ends_by_author(prompt: PromptText, mark: str) -> bool:
    left = prompt.rstrip()
    if not left.endswith(mark) or not left.ranges:
        return False
    start, end = left.ranges[-1]
    return end == len(left) and start <= end - len(mark)


def find_format(
    source: str, shown_reasoning: str | None, prompt: PromptText, markers: Markers
) -> ReasoningFormat | None:
    """``shown_reasoning`` is a rendering of the probe's reasoning, where the template shows it."""
    if shown_reasoning is not None and (found := _SHOWN.search(shown_reasoning)):
        after = found["after"] if found["after"] is not None else ""
        return ReasoningFormat(
            markers.tag(found["open"]), markers.tag(found["close"]), found["space"], found["close_space"], after
        )
    think = ReasoningFormat(markers.tag("<think>"), markers.tag("</think>"))
    return think if think.is_opened_by(prompt) or _CUT_AT.search(source) else None
