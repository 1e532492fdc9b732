"""Reasoning that a client carries for us from one request to the next, when it keeps the conversation itself.

OpenAI calls it ``encrypted_content``, Anthropic ``signature``, because their callers may not read or change the
reasoning. Here they may: it is in the answer as text anyway, unless the caller wants it left out. So this is no secret
and has no key, only a form that clients pass back untouched, also those that drop the readable text. Whoever changes
it changes what they say the model thought, as they can with every other message.
"""

import base64
import binascii

_VERSION = b"\x01"


def carry(reasoning: str) -> str:
    """The ``encrypted_content`` of a reasoning item, or the ``signature`` of a thinking block."""
    return base64.urlsafe_b64encode(_VERSION + reasoning.encode("utf-8", "replace")).decode()


def carried(encrypted: str) -> str | None:
    """The reasoning again; None for what another server made."""
    try:
        packed = base64.b64decode(encrypted.encode("ascii"), altchars=b"-_", validate=True)
        return packed[1:].decode() if packed[:1] == _VERSION else None
    except (binascii.Error, ValueError):
        return None
