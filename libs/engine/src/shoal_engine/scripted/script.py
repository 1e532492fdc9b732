"""A script: what a scripted engine answers where its prompt ends as a line of the script says.

The file has a JSON object a line: ``{"after": [ids], "answer": [ids], "stop": true}``. Of the lines whose ``after``
stands in the prompt the one that stands last counts, the longer one where two end together; so a conversation is played
turn by turn. The answer ends with a stop token unless ``stop`` is false: then invented tokens follow.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal_contracts.ids import pack_u32
from shoal_engine.api import EngineFailed

_TOKEN_BYTES = 4


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    after: list[int]
    answer: list[int]
    stop: bool = True


@dataclass(frozen=True, slots=True)
class PlayedAnswer:
    """``is_ended``: a stop token follows the last of ``token_ids``."""

    token_ids: list[int]
    is_ended: bool


class Script:
    """Read once; shared by all requests."""

    def __init__(self, lines: list[tuple[bytes, PlayedAnswer]]) -> None:
        self._lines = lines

    @classmethod
    def read(cls, path: Path) -> "Script":
        """Raises EngineFailed for a file that is none."""
        try:
            lines = [msgspec.json.decode(line, type=_Line) for line in path.read_bytes().splitlines() if line.strip()]
        except (OSError, msgspec.MsgspecError) as exc:
            raise EngineFailed(f"the script {path} cannot be read: {exc}") from exc
        if any(not line.after for line in lines):
            raise EngineFailed(f"the script {path} has a line with nothing in 'after'")
        return cls([(pack_u32(line.after), PlayedAnswer(line.answer, line.stop)) for line in lines])

    def find(self, prompt: bytes) -> PlayedAnswer | None:
        """``prompt`` is packed token ids."""
        best: tuple[int, int] = (-1, 0)
        found: PlayedAnswer | None = None
        for after, answer in self._lines:
            place = (_last_end(prompt, after), len(after))
            if place[0] >= 0 and place > best:
                best, found = place, answer
        return found


def _last_end(prompt: bytes, after: bytes) -> int:
    """Where the last whole occurrence ends; -1 for none. One that is not on a token's border is none."""
    at = prompt.rfind(after)
    while at >= 0 and at % _TOKEN_BYTES:
        at = prompt.rfind(after, 0, at + len(after) - 1)
    return at + len(after) if at >= 0 else -1
