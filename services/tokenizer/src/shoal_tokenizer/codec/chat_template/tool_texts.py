"""Which parameters of which tools are text: all that reading a call without quotes needs of the schemas."""

from collections.abc import Iterable, Mapping
from typing import Any


def text_parameters(tools: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """By name of the tool. A parameter that may be anything else than text beside null is not listed."""
    return {tool["function"]["name"]: _text_properties(tool["function"].get("parameters")) for tool in tools}


def _text_properties(parameters: object) -> tuple[str, ...]:
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return ()
    return tuple(name for name, schema in properties.items() if _is_text(schema))


def _is_text(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return False
    kind = schema.get("type")
    if isinstance(kind, list):
        return "string" in kind and not set(map(str, kind)) - {"string", "null"}
    if kind is None:
        allowed = schema.get("enum")
        return isinstance(allowed, list) and bool(allowed) and all(isinstance(value, str) for value in allowed)
    return bool(kind == "string")
