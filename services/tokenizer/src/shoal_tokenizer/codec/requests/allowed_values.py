"""Which words a body may have at a place: read from the structures that it is decoded into, so that errors can tell."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any

from msgspec import inspect

_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")


def allowed_values(structure: Any, path: str) -> list[str]:
    """The words for ``path``, as msgspec writes paths; empty where more than certain words may stand.

    A structure with a true ``is_refused`` is understood but not taken: its tag is left out.
    """
    kinds: Iterable[inspect.Type] = [_describe(structure)]
    for step in _STEP.findall(path):
        kinds = list(chain.from_iterable(_inside(kind, step) for kind in _alternatives(kinds)))
    values = (kind.values for kind in _alternatives(kinds) if isinstance(kind, inspect.LiteralType))
    return list(dict.fromkeys(str(value) for value in chain.from_iterable(values)))


@cache
def _describe(structure: Any) -> inspect.Type:
    return inspect.type_info(structure)


def _alternatives(kinds: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for kind in kinds:
        if isinstance(kind, inspect.UnionType):
            yield from _alternatives(kind.types)
        elif isinstance(kind, inspect.Metadata):
            yield from _alternatives([kind.type])
        else:
            yield kind


def _inside(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.ListType) and step.startswith("["):
        yield kind.item_type
    elif isinstance(kind, inspect.DictType) and step == "[...]":
        yield kind.value_type
    elif isinstance(kind, inspect.StructType):
        if step == kind.tag_field and kind.tag is not None and not getattr(kind.cls, "is_refused", False):
            yield inspect.LiteralType((kind.tag,))
        yield from (field.type for field in kind.fields if field.encode_name == step)
