"""Stored JSON, as far as the store must look into it: where the items are and what they are called.

Items go through as the bytes that they are.
"""

from collections.abc import Iterable

import msgspec

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1 import common_pb2 as pb


class _Body(msgspec.Struct):
    output: list[msgspec.Raw] = []


class _Item(msgspec.Struct):
    id: str = ""


_read_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_read_body = msgspec.json.Decoder(_Body).decode
_read_item = msgspec.json.Decoder(_Item).decode
_write = msgspec.json.Encoder().encode


def output_items(body: bytes) -> bytes:
    """Those of a response object, as an array."""
    return _write(_read_body(body).output)


def join_items(arrays: Iterable[bytes]) -> bytes:
    """One array of all items."""
    return _write([item for array in arrays for item in _read_items(array)])


def list_items(input_items: bytes, *, is_newest_first: bool, after: str | None, limit: int) -> bytes:
    """One page in the API's list object. BadRequest when ``after`` is none of them."""
    items = [(_read_item(item).id, item) for item in _read_items(input_items)]
    if is_newest_first:
        items.reverse()
    if after is not None:
        names = [name for name, _ in items]
        if after not in names:
            raise BadRequest(pb.INVALID_REQUEST, f"There is no item '{after}' here.", param="after")
        items = items[names.index(after) + 1 :]
    page = items[:limit]
    return _write(
        {
            "object": "list",
            "data": [item for _, item in page],
            "first_id": page[0][0] if page else None,
            "last_id": page[-1][0] if page else None,
            "has_more": len(items) > len(page),
        }
    )
