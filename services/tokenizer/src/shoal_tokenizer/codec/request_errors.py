"""What msgspec says about a body, in the words and with the field names of the API."""

import re
from collections.abc import Sequence

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1.common_pb2 import INVALID_REQUEST

_PLACE = re.compile(r"(?s)(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?")
_TYPE = re.compile(r"Expected `(?P<expected>[^`]*)`(?:, got `(?P<got>[^`]*)`)?")
_RANGE = re.compile(r"Expected `(?P<kind>\w+)`(?P<of_length> of length)? (?P<bound>[<>]=? \S+)")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`")
_VALUE = re.compile(r"(?s)Invalid (?:enum )?value (?P<value>.*)")

_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


def decoding_error(error: Exception, roles: Sequence[str]) -> BadRequest:
    """``error`` is what decoding raised: a ``msgspec.MsgspecError`` or a ``RecursionError``."""
    if isinstance(error, RecursionError):
        return BadRequest(INVALID_REQUEST, "The body is nested too deeply.")
    place = _PLACE.fullmatch(str(error))
    what = place["what"] if place else str(error)
    path = (place["path"] or "").lstrip(".").removesuffix("[...]") if place else ""
    if match := _MISSING.fullmatch(what):
        param = _join(path, match["field"])
        return _error(f"Missing required parameter: '{param}'.", param)
    if match := _UNKNOWN.fullmatch(what):
        return _error(
            f"Unrecognized request argument supplied: {match['field'][:64]}", _join(path, match["field"][:64])
        )
    if match := _VALUE.fullmatch(what):
        allowed = f" Supported values are: {', '.join(map(repr, roles))}." if path.endswith("role") else ""
        return _error(f"Invalid value: {match['value'][:64]}.{allowed}", path)
    if match := _RANGE.fullmatch(what):
        subject = "number of entries" if match["of_length"] and match["kind"] == "array" else "value"
        subject = "length" if match["of_length"] and match["kind"] == "str" else subject
        return _error(f"Invalid '{path}': the {subject} must be {match['bound']}.", path)
    if match := _TYPE.fullmatch(what):
        expected = " or ".join(_TYPE_NAMES.get(name, name) for name in match["expected"].split(" | "))
        got = f", but got {_TYPE_NAMES.get(match['got'], match['got'])}" if match["got"] else ""
        subject = f"Invalid type for '{path}'" if path else "Invalid type of the body"
        return _error(f"{subject}: expected {expected}{got}.", path)
    return BadRequest(INVALID_REQUEST, f"We could not parse the JSON body of your request: {what}.")


def _error(message: str, param: str) -> BadRequest:
    return BadRequest(INVALID_REQUEST, message, param=param or None)


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field
