"""Server-sent events as bytes, read strictly: what every grammar checker begins with."""

import json
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]
DONE = "[DONE]"


class GrammarBroken(AssertionError):
    """The stream says something that its API does not allow; the message says which event."""


def require(is_so: bool, what: str) -> None:
    if not is_so:
        raise GrammarBroken(what)


def read_blocks(raw: bytes) -> list[list[str]]:
    """The lines of each event, without comments, which are keep-alives."""
    require(raw.endswith(b"\n\n"), "the last event is cut off")
    blocks = raw.decode().removesuffix("\n\n").split("\n\n")
    without_comments = ([line for line in block.split("\n") if not line.startswith(":")] for block in blocks)
    return [lines for lines in without_comments if lines]


def read_json(line: str) -> Event:
    """The JSON object of a data line."""
    before, found, text = line.partition("data: ")
    require(not before and bool(found), f"no data line: {line[:200]!r}")
    event = json.loads(text, parse_constant=_no_constant)
    require(isinstance(event, dict), f"no object: {line[:200]!r}")
    return dict(event)


def read_named(raw: bytes) -> list[Event]:
    """Events whose line names their ``type``."""
    events = []
    for lines in read_blocks(raw):
        require(len(lines) == 2, f"an event of {len(lines)} lines: {lines!r:.200}")
        before, found, name = lines[0].partition("event: ")
        require(not before and bool(found), f"no event line: {lines[0][:200]!r}")
        event = read_json(lines[1])
        require(event.get("type") == name, f"the line names {name!r}, the event {event.get('type')!r}")
        events.append(event)
    return events


def _no_constant(name: str) -> None:
    raise GrammarBroken(f"{name} is no JSON")
