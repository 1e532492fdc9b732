"""Answers as DeepSeek's models write them, calls included; as text, and as segments in which marks are tokens."""

from dataclasses import dataclass

MARKS = ("<think>", "</think>", "｜DSML｜", "<｜User｜>")


@dataclass(frozen=True, slots=True)
class DeepseekAnswers:
    """Of V4, or of V4.1, which has a space behind every ``｜DSML｜``."""

    is_v4: bool

    @property
    def space(self) -> str:
        return "" if self.is_v4 else " "

    def invoke(self, name: str, *parameters: tuple[str, str, str]) -> str:
        """One call. Parameters are (name, value of ``string``, text). V4.1 has an empty line without any."""
        space = self.space
        lines = [
            f'<｜DSML｜{space}parameter name="{key}" string="{is_text}">{text}</｜DSML｜{space}parameter>\n'
            for key, is_text, text in parameters
        ]
        if not lines and not self.is_v4:
            lines = ["\n"]
        return f'<｜DSML｜{space}invoke name="{name}">\n{"".join(lines)}</｜DSML｜{space}invoke>\n'

    def block(self, *invokes: str) -> str:
        """All calls of an answer."""
        calls = "tool_calls" if self.is_v4 else " calls"
        return f"\n\n<｜DSML｜{calls}>\n{''.join(invokes)}</｜DSML｜{calls}>"


def segments(text: str) -> list[tuple[str, bool]]:
    """For an encoder: marks are tokens wherever they stand."""
    found: list[tuple[str, bool]] = []
    at = 0
    for start in range(len(text)):
        mark = next((mark for mark in MARKS if text.startswith(mark, start)), None)
        if mark is not None:
            found += [(text[at:start], False), (mark, True)]
            at = start + len(mark)
    return [segment for segment in [*found, (text[at:], False)] if segment[0]]
