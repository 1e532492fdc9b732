"""What msgspec says about a body, in the words and with the field names of the API."""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1.common_pb2 import INVALID_REQUEST
from shoal_tokenizer.codec.requests.allowed_values import allowed_values

Request = TypeVar("Request")

_SHOWN_CHARS = 64
_PLACE = re.compile(r"(?s)(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?")

_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_COUNTED = {"array": "the number of entries", "object": "the number of entries", "str": "the length"}


def body_reader(structure: type[Request]) -> Callable[[bytes], Request]:
    """Reads bodies of this structure. Raises BadRequest."""
    decode = msgspec.json.Decoder(structure).decode

    def read(body: bytes) -> Request:
        try:
            return decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise decoding_error(error, structure=structure) from None

    return read


def decoding_error(error: Exception, roles: Sequence[str] = (), structure: Any = None) -> BadRequest:
    """``error`` is what decoding raised: a ``msgspec.MsgspecError``, a ``RecursionError`` or a ``UnicodeDecodeError``.

    With ``structure``, what the body was decoded into, errors tell which words a field takes; ``roles`` are those of a
    field named ``role`` otherwise.
    """
    if isinstance(error, RecursionError):
        return BadRequest(INVALID_REQUEST, "The body is nested too deeply.")
    if isinstance(error, UnicodeDecodeError):
        return BadRequest(INVALID_REQUEST, "We could not parse the JSON body of your request: it is not UTF-8.")
    place = _PLACE.fullmatch(str(error))
    what = place["what"] if place else str(error)
    if place is None or (place["path"] is None and not what.startswith(("Expected", "Object"))):
        return BadRequest(INVALID_REQUEST, f"We could not parse the JSON body of your request: {what}.")
    path = (place["path"] or "").lstrip(".")
    param = path.removesuffix("[...]")
    if place["key"]:
        return _error(f"A key of '{param}' is not taken: {_sentence_end(what)}.", param)
    for form, tell in _FORMS:
        if match := form.fullmatch(what):
            return tell(match, param)
    if match := _VALUE.fullmatch(what):
        values = allowed_values(structure, path) if structure is not None else []
        return _wrong_word(match["value"], values or (roles if path.endswith("role") else ()), param)
    return _error(f"Invalid '{param}': {_sentence_end(what)}.", param)


def _missing(match: re.Match[str], path: str) -> BadRequest:
    param = _join(path, match["field"])
    return _error(f"Missing required parameter: '{param}'.", param)


def _unknown(match: re.Match[str], path: str) -> BadRequest:
    param = _join(path, match["field"][:_SHOWN_CHARS])
    return _error(f"Unrecognized request argument supplied: {param}", param)


def _out_of_range(match: re.Match[str], path: str) -> BadRequest:
    subject = _COUNTED.get(match["kind"], "the value") if match["of_length"] else "the value"
    return _error(f"Invalid '{path}': {subject} must be {match['bound']}.", path)


def _wrong_form(match: re.Match[str], path: str) -> BadRequest:
    return _error(f"Invalid '{path}': the value must match {match['pattern']}.", path)


def _wrong_type(match: re.Match[str], path: str) -> BadRequest:
    expected = _names(match["expected"])
    got = f", but got {_names(match['got'])}" if match["got"] else ""
    subject = f"Invalid type for '{path}'" if path else "Invalid type of the body"
    return _error(f"{subject}: expected {expected}{got}.", path)


def _wrong_word(value: str, values: Sequence[str], path: str) -> BadRequest:
    known = f" Supported values are: {', '.join(map(repr, values))}." if values else ""
    return _error(f"Invalid value: {value[:_SHOWN_CHARS]}.{known}", path)


_VALUE = re.compile(r"(?s)Invalid (?:enum )?value (?P<value>.*)")
_FORMS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], str], BadRequest]], ...] = (
    (re.compile(r"Object missing required field `(?P<field>[^`]*)`"), _missing),
    (re.compile(r"(?s)Object contains unknown field `(?P<field>.*)`"), _unknown),
    (re.compile(r"Expected `(?P<kind>\w+)`(?P<of_length> of length)? (?P<bound>[<>]=? \S+)"), _out_of_range),
    (re.compile(r"(?s)Expected `str` matching regex '?(?P<pattern>.*?)'?"), _wrong_form),
    (re.compile(r"Expected `(?P<expected>[^`]*)`(?:, got `(?P<got>[^`]*)`)?"), _wrong_type),
)


def _names(kinds: str) -> str:
    return " or ".join(dict.fromkeys(_TYPE_NAMES.get(name, name) for name in kinds.split(" | ")))


def _sentence_end(what: str) -> str:
    """msgspec's own words without its quotes, for what has no form of its own."""
    return what.replace("`", "")[:1].lower() + what.replace("`", "")[1:]


def _error(message: str, param: str) -> BadRequest:
    return BadRequest(INVALID_REQUEST, message, param=param or None)


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field
