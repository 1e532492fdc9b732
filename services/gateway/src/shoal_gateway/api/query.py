"""What the list endpoints read of a query."""

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1 import common_pb2 as pb

MOST_DIGITS = 9


def read_limit(text: str | None, usual: int, most: int) -> int:
    """How many entries are asked for."""
    if text is None:
        return usual
    if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS and 1 <= int(text) <= most:
        return int(text)
    raise BadRequest(pb.INVALID_REQUEST, f"'limit' must be a number from 1 to {most}.", param="limit")
