"""What becomes of each field of a request: the table that an API's converter works by and the documents show.

A converter declares every field that it knows of in its structure, so that an unknown one is refused by name, and
gives each a verdict here. Refused fields are refused by this table, with its words.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1.common_pb2 import INVALID_REQUEST, UNSUPPORTED


class Verdict(enum.Enum):
    """What a field does here."""

    HONOURED = "honoured"  # as the API says
    TRANSLATED = "translated"  # what it asks for is done in other words
    IGNORED = "ignored"  # taken, and changes nothing
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    """``note`` says how, why not, or what to do instead; a sentence for the caller where the field is refused."""

    verdict: Verdict
    note: str = ""


FieldTable: TypeAlias = Mapping[str, Field]  # a dotted path below the body, ``[]`` for each element of a list

HONOURED = Field(Verdict.HONOURED)


def translated(note: str) -> Field:
    return Field(Verdict.TRANSLATED, note)


def ignored(note: str) -> Field:
    return Field(Verdict.IGNORED, note)


def refused(note: str = "") -> Field:
    return Field(Verdict.REFUSED, note)


def refuse_fields(request: Any, table: FieldTable) -> None:
    """BadRequest (UNSUPPORTED) for the first top-level field that is set and refused by the table."""
    for name, entry in table.items():
        if entry.verdict is Verdict.REFUSED and "." not in name and getattr(request, name, None) is not None:
            raise unsupported(f"'{name}' is not supported here. {entry.note}".strip(), name)


def invalid(message: str, param: str) -> BadRequest:
    """The caller contradicts the API or itself."""
    return BadRequest(INVALID_REQUEST, message, param=param)


def unsupported(message: str, param: str) -> BadRequest:
    """Understood, and not offered."""
    return BadRequest(UNSUPPORTED, message, param=param)
