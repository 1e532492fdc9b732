"""What every recorded agent does in a play: send a body, put the answer back as its client would, go on.

An agent owns its history. ``body`` is the next request, ``hear`` takes the events of a whole answer and says whether
tools were called (their results are then in the history), ``break_off`` takes what came before the user interrupted.
"""

import json
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, TypeAlias

from shoal_testkit.plays import THINK_END, Line

Event: TypeAlias = dict[str, Any]


class Agent(Protocol):
    """One conversation of one client."""

    path: str
    task: str  # what the user says first
    headers: ClassVar[dict[str, str]]
    lines: ClassVar[list[Line]]  # what the engine has to answer for the play
    goes_on: str  # what the user says after the interruption

    def say(self, text: str) -> None: ...

    def body(self) -> dict[str, Any]: ...

    def hear(self, events: list[Event]) -> bool: ...

    def break_off(self, events: list[Event]) -> None: ...

    def text(self) -> str:
        """What the model said last."""

    @staticmethod
    def usage(events: list[Event]) -> tuple[int, int]:
        """Prompt tokens and hit tokens of an answer."""


def events_of(raw: bytes) -> list[Event]:
    """The JSON of each event of a stream, also of one that was cut off."""
    lines = raw.decode().split("\n")
    if not raw.endswith(b"\n"):
        lines.pop()  # torn by the interruption
    found = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    return [json.loads(text) for text in found if text != "[DONE]"]


def function(name: str, description: str, required: Iterable[str] = (), /, **properties: Any) -> dict[str, Any]:
    """A tool as OpenAI's APIs nest it inside of ``function``; a property given as text is a string of that meaning."""
    return {"name": name, "description": description, "parameters": schema(required, **properties)}


def schema(required: Iterable[str] = (), /, **properties: Any) -> dict[str, Any]:
    """An object that takes nothing else."""
    described = {
        name: {"type": "string", "description": given} if isinstance(given, str) else given
        for name, given in properties.items()
    }
    return {
        "type": "object",
        "properties": described,
        "required": list(required),
        "additionalProperties": False,
    }


def tail(text: str) -> str:
    """The cue of a turn that has more in it than this: from its first space on, where ids cannot depend on before."""
    return text[text.index(" ") :]


LONG = f"I count.{THINK_END}" + " ".join(map(str, range(1500)))
COUNT = "Now count aloud until I stop you."
GO_ON = "Enough of that, tell me what you did."
DONE = f"They want a summary.{THINK_END}I read two files, changed one and ran the tests."
DONE_TEXT = DONE.split(THINK_END)[1]
