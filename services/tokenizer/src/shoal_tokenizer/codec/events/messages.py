"""Messages, the answer."""

import msgspec


def write_count(prompt_tokens: int) -> bytes:
    """The body of ``count_tokens``."""
    return msgspec.json.encode({"input_tokens": prompt_tokens})
