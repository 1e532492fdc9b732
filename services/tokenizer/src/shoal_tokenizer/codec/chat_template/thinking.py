"""Which variables of a template turn thinking on and off, and how a wish for thinking becomes their values.

There is no standard: the variables in use are tried at load, and those that change the prompt are the template's. A
wish that the template does not know is told as a note, because the answer is still one to the question.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal_tokenizer.codec.conversation import Effort, Thinking

_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_USUAL_EFFORTS = (Effort.LOW, Effort.MEDIUM, Effort.HIGH)
_ORDER = tuple(Effort)


@dataclass(frozen=True, slots=True)
class ThinkingVariables:
    """What the template reads. ``efforts``: the words that it knows."""

    switch: str | None = None
    efforts: tuple[Effort, ...] = ()

    def choose(self, thinking: Thinking, thinks: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Values for the template, and notes on what it does not know. ``thinks``: the model has a way to reason."""
        variables: dict[str, Any] = {}
        notes: list[str] = []
        if thinking.is_on is not None and self.switch is not None:
            variables[self.switch] = thinking.is_on
        elif thinking.is_on is False and thinks:
            notes.append("thinking: this model's chat template cannot turn it off")
        elif thinking.is_on and not thinks:
            notes.append("thinking: this model's chat template has none")
        if thinking.effort is not None and thinking.is_on is not False:
            variables |= self._choose_effort(thinking.effort, notes)
        return variables, tuple(notes)

    def _choose_effort(self, effort: Effort, notes: list[str]) -> dict[str, Any]:
        if not self.efforts:
            notes.append("effort: this model's chat template knows none, so it has no effect")
            return {}
        nearest = min(self.efforts, key=lambda known: abs(_ORDER.index(known) - _ORDER.index(effort)))
        if nearest is not effort:
            notes.append(f"effort: '{effort.value}' is not known to this model, '{nearest.value}' was taken")
        return {_EFFORT: nearest.value}


def find_variables(source: str, render: Callable[[Mapping[str, Any]], str | None]) -> ThinkingVariables:
    """``render`` gives the prompt of a probe with these variables, None where the template refuses."""
    switch = next(
        (name for name in _SWITCHES if name in source and render({name: True}) != render({name: False})), None
    )
    efforts: tuple[Effort, ...] = ()
    if _EFFORT in source and len({render({_EFFORT: effort.value}) for effort in _USUAL_EFFORTS}) > 1:
        quoted = (f"'{effort.value}'" in source or f'"{effort.value}"' in source for effort in _ORDER)
        efforts = tuple(
            effort for effort, is_named in zip(_ORDER, quoted, strict=True) if is_named or effort in _USUAL_EFFORTS
        )
    return ThinkingVariables(switch, efforts)
