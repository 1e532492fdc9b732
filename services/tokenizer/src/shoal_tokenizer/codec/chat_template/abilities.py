"""What a chat template can show and in which forms its model answers; found out once, at load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from shoal_tokenizer.codec.chat_template import formats, probes, thinking
from shoal_tokenizer.codec.chat_template.formats import AnswerFormats
from shoal_tokenizer.codec.chat_template.markers import Markers
from shoal_tokenizer.codec.chat_template.prompt_text import PromptText
from shoal_tokenizer.codec.chat_template.thinking import ThinkingVariables

# Messages, tools, variables, whether an answer is to begin -> the prompt; None where the template refuses.
TryRender: TypeAlias = Callable[
    [Sequence[dict[str, Any]], list[dict[str, Any]] | None, Mapping[str, Any], bool], PromptText | None
]


@dataclass(frozen=True, slots=True)
class Abilities:
    """Which optional parts of a conversation the template puts into the prompt, and how answers look."""

    has_system: bool
    has_tools: bool
    has_tool_results: bool
    formats: AnswerFormats
    thinking: ThinkingVariables


def find_abilities(source: str, render: TryRender, markers: Markers) -> Abilities:
    """Tries the template on the probes."""

    def shows(messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None, *words: str) -> bool:
        text = render(messages, tools, {}, True)
        return text is not None and all(word in text for word in words)

    def history(messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> PromptText | None:
        return render(messages, tools, {}, False)

    prompt = render([probes.USER], None, {}, True) or PromptText()
    call = probes.call_message()
    has_calls = shows(
        [probes.USER, call, probes.RESULT], [probes.TOOL], probes.CALL_NAME, probes.CALL_VALUE, "Probe reading"
    )
    return Abilities(
        has_system=shows([probes.SYSTEM, probes.USER], None, "Probe system."),
        has_tools=shows([probes.USER], [probes.TOOL], "probe_tool"),
        has_tool_results=has_calls,
        formats=AnswerFormats(
            reasoning=formats.find_reasoning(history, source, prompt, markers),
            calls=formats.find_calls(history, markers) if has_calls else None,
        ),
        thinking=thinking.find_variables(source, lambda variables: render([probes.USER], None, variables, True)),
    )
