"""What every way of writing tool calls has in common: its tags, its reader, and how a call ends.

A format is found at load by its own file (hermes.py, llama.py, qwen_xml.py) in how the template writes a call of the
history. A reader belongs to one call of one answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from shoal_tokenizer.codec.api import AnswerShape, Part
from shoal_tokenizer.codec.chat_template.tag import Tag
from shoal_tokenizer.codec.text_parser import longest_end

MAX_NAME_CHARS = 256
MAX_HELD_CHARS = 65_536  # of what must be whole before it can be told what it is


class CallReader(Protocol):
    """Reads one call, from behind its opening tag on. What comes out depends on the text only, not on its pieces."""

    is_begun: bool  # a CallBegin came out: what was read cannot be text any more
    is_text: bool  # it is no call: all that was read is text
    is_over: bool  # the call ended; ``rest`` of what was read lies behind it
    rest: str

    def push(self, text: str) -> list[Part]: ...

    def end(self) -> list[Part]:
        """The closing token came."""

    def close(self) -> list[Part]:
        """The answer is over: a call that is not complete stays open, one that has not begun is text."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How one template writes calls.

    A call is ``begin head[0] NAME head[1] ARGUMENTS tail end``. Without ``begin`` a call is known by its head, at the
    beginning of the answer and behind other calls only.
    """

    begin: Tag | None
    end: Tag | None
    head: tuple[str, str]
    tail: str
    arguments: Literal["json", "qwen_xml"]
    new_reader: Callable[[AnswerShape, str | None], CallReader]  # the closing tag as far as it is text
    is_bare: bool = False  # may also come without ``begin``
    before: str = ""  # what the template writes between a text and the first call
    between: str = ""  # and between calls
    separators: str = ""  # what else than white space models write there

    @property
    def needs_tools(self) -> bool:
        """Whether answers can be read only by someone who knows the tools of the request."""
        return self.is_bare or self.arguments != "json"

    def reader(self, shape: AnswerShape) -> CallReader:
        return self.new_reader(shape, self.end.text if self.end is not None and self.end.token_id is None else None)


def read_tail(held: str, closers: str, end_text: str | None) -> tuple[bool, str]:
    """What follows complete arguments: whether the call is over, and what is left behind it.

    ``closers`` close the call itself, more of them than needed are a slip. With ``end_text`` the call goes up to it;
    anything else before it ends the call there, so that it is shown.
    """
    left = held.lstrip()
    while closers and left.startswith(closers):
        left = left[len(closers) :].lstrip()
    if end_text is None:
        return False, left
    if left.startswith(end_text):
        return True, left[len(end_text) :]
    is_undecided = longest_end(left, end_text) == len(left)
    return not is_undecided, left
