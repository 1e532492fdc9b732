"""Requests over bare sockets, for many at once and for clients that read as they like: no HTTP client in between."""

import asyncio
import json
from typing import Any

CHAT_PATH = "/v1/chat/completions"


async def send_chat(url: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send the whole request on a connection of its own; the server closes it after the answer."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    sent = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(sent)}\r\n\r\n"
    writer.write(head.encode() + sent)
    await writer.drain()
    return reader, writer


async def read_chat(url: str, body: dict[str, Any]) -> bytes:
    """The events of one streamed answer, or AssertionError with the beginning of another one."""
    reader, writer = await send_chat(url, body)
    answer = await reader.read(-1)
    writer.close()
    head, _, sized = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), answer[:500]
    return _without_sizes(sized)


def _without_sizes(sized: bytes) -> bytes:
    """The body of a chunked answer."""
    body = bytearray()
    at = 0
    while at < len(sized):
        end = sized.index(b"\r\n", at)
        size = int(sized[at:end], 16)
        body += sized[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
    return bytes(body)
