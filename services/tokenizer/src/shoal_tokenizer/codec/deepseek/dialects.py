"""What differs between the DeepSeek models that deepseek-recipe knows: encoding, spelling of calls, fixed sampling."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import deepseek_recipe as recipe

from shoal_tokenizer.codec.conversation import Effort

END_OF_TURN = "<｜end▁of▁sentence｜>"
BEGIN_OF_TEXT = "<｜begin▁of▁sentence｜>"
THINK = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """Ids of the tokens that an answer is made of beside text."""

    end_of_turn: int
    think: int
    think_end: int
    dsml: int


Encoding: TypeAlias = recipe.DeepseekV4Encoding | recipe.DeepseekV41Encoding


@dataclass(frozen=True, slots=True)
class Dialect:
    """``space`` stands behind every ``｜DSML｜``; ``xml_style`` is xgrammar's name for how arguments are written.

    Sampling is what DeepSeek serves the model with; a model that thinks was trained on that alone.
    """

    name: str
    encoding: Encoding
    version: recipe.ModelVersion
    calls: str
    space: str
    xml_style: str
    thinking: Mapping[str, float]
    thinking_with_tools: Mapping[str, float]
    least_thinking: Mapping[str, float]
    answering: Mapping[str, float]

    def fixed_sampling(self, *, thinks: bool, has_tools: bool) -> Mapping[str, float]:
        """Sampling fields that the mode dictates."""
        if not thinks:
            return self.answering
        return self.thinking_with_tools if has_tools else self.thinking

    def least_sampling(self, *, thinks: bool) -> Mapping[str, float]:
        """Sampling fields that the mode raises to this where they are lower."""
        return self.least_thinking if thinks else {}


V4 = Dialect(
    name="DeepSeek V4",
    encoding=recipe.DeepseekV4Encoding(),
    version=recipe.ModelVersion.DeepseekV4Pro,
    calls="tool_calls",
    space="",
    xml_style="deepseek_xml",
    thinking={"temperature": 1.0, "top_p": 1.0},
    thinking_with_tools={"temperature": 1.0, "top_p": 0.95},
    least_thinking={},
    answering={},
)
V41 = Dialect(
    name="DeepSeek V4.1",
    encoding=recipe.DeepseekV41Encoding(),
    version=recipe.ModelVersion.DeepseekV41Flash,
    calls="calls",
    space=" ",
    xml_style="deepseek_v4_1_xml",
    thinking={"temperature": 1.0},
    thinking_with_tools={"temperature": 1.0},
    least_thinking={"top_p": 0.95},
    answering={"top_p": 1.0},
)

# How recipe names an effort, and which of its efforts that is in the prompt.
EFFORTS: Mapping[Effort, tuple[Literal["low", "high", "xhigh", "max"], Effort]] = {
    Effort.MINIMAL: ("low", Effort.LOW),
    Effort.LOW: ("low", Effort.LOW),
    Effort.MEDIUM: ("high", Effort.HIGH),
    Effort.HIGH: ("high", Effort.HIGH),
    Effort.XHIGH: ("xhigh", Effort.HIGH),
    Effort.MAX: ("max", Effort.MAX),
}
