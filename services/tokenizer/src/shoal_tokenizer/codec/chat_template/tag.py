"""A mark that divides an answer: where reasoning or a tool call begins or ends."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tag:
    """Where the tokenizer has a token for it, only that token is the mark, and its spelling in other tokens is text."""

    text: str
    token_id: int | None = None
