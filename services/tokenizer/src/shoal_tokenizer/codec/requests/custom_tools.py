"""Custom tools: one text in, without JSON around it. A model family sees a function with the one string ``input``."""

from typing import Any

INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
GRAMMAR_NOTE = "the grammar is told to the model as part of the description, not enforced."


def describe_grammar(description: str | None, syntax: str, definition: str) -> str:
    """A tool's description that tells the grammar of its input."""
    kind = "Lark grammar" if syntax == "lark" else "regular expression"
    grammar = f"The input has to match this {kind}:\n{definition}"
    return f"{description}\n\n{grammar}" if description else grammar
