"""In which forms a model answers, found out at load from how its template writes the history."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from shoal_tokenizer.codec.chat_template import hermes, llama, probes, qwen_xml, reasoning
from shoal_tokenizer.codec.chat_template.calls import CallFormat
from shoal_tokenizer.codec.chat_template.markers import Markers
from shoal_tokenizer.codec.chat_template.prompt_text import PromptText
from shoal_tokenizer.codec.chat_template.reasoning import ReasoningFormat

# Messages and tools -> the prompt, without the beginning of an answer; None where the template refuses.
Render: TypeAlias = Callable[[Sequence[dict[str, Any]], list[dict[str, Any]] | None], PromptText | None]

_CALL_FORMATS = (hermes.find_format, qwen_xml.find_format, llama.find_format)


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """``calls`` None: what looks like a call is text."""

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None


def find_calls(render: Render, markers: Markers) -> CallFormat | None:
    """The first format that fits a call of the history."""
    shown = render([probes.USER, probes.call_message(), probes.RESULT], [probes.TOOL])
    if shown is None:
        return None
    found = next(filter(None, (find(shown, markers) for find in _CALL_FORMATS)), None)
    return None if found is None else _with_spaces(found, render)


def find_reasoning(render: Render, source: str, prompt: PromptText, markers: Markers) -> ReasoningFormat | None:
    """The format of the template's reasoning. ``prompt``: of one question."""
    message = {**probes.ASSISTANT, "reasoning_content": probes.REASONING}
    shown = render([probes.USER, message], None)
    is_shown = shown is not None and probes.REASONING in shown
    return reasoning.find_format(source, shown if is_shown else None, prompt, markers)


def _with_spaces(found: CallFormat, render: Render) -> CallFormat:
    """White space that the template writes around calls: it belongs to them, not to the text."""
    begin = found.begin.text if found.begin is not None and not found.is_bare else ""
    opening = begin + found.head[0] + probes.CALL_NAME
    closing = found.tail + (found.end.text if found.end is not None else "")
    after_text = render([probes.USER, probes.call_message(probes.ANSWER)], [probes.TOOL]) or ""
    two_calls = render([probes.USER, probes.call_message(count=2)], [probes.TOOL]) or ""
    first = two_calls.find(opening)
    before = _between(after_text, probes.ANSWER, opening, 0)
    between = _between(two_calls, closing, opening, first) if first >= 0 else None
    return replace(
        found,
        before=found.before if before is None else before,
        between=found.between if between is None else between,
    )


def _between(text: str, left: str, right: str, start: int) -> str | None:
    """What stands between the two, if that is white space."""
    end_of_left = text.find(left, start)
    start_of_right = text.find(right, end_of_left)
    if end_of_left < 0 or start_of_right < 0:
        return None
    found = str.__str__(text)[end_of_left + len(left) : start_of_right]
    return None if found.strip() else found
