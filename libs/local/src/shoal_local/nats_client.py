"""A plain connection to the NATS of any system, for commands that look at it for a moment and go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import nats
import nats.errors
from nats.aio.client import Client

CONNECT_S = 3


class NatsAway(Exception):
    """NATS cannot be reached; the message tells what to look at."""


@asynccontextmanager
async def connected(nats_url: str) -> AsyncIterator[Client]:
    """Open for the time of the block. Raises NatsAway when NATS does not answer, or breaks off inside."""
    try:
        # Who looks at a system wants to hear at once that it is not there; nats-py alone tries for two minutes.
        async with asyncio.timeout(CONNECT_S):
            client = await nats.connect(nats_url, connect_timeout=CONNECT_S, allow_reconnect=False, error_cb=_ignore)
    except (OSError, TimeoutError, ValueError, nats.errors.Error) as error:
        raise NatsAway(
            f"NATS at {shown_address(nats_url)} does not answer. Is it the right address (--nats, SHOAL_NATS_URL)?"
        ) from error
    try:
        yield client
    except nats.errors.Error as error:
        raise NatsAway(f"NATS at {shown_address(nats_url)} broke the connection; try again.") from error
    finally:
        await client.close()


async def _ignore(_: Exception) -> None:
    """A failure shows at the call that meets it; nats-py would print it as well."""


def shown_address(nats_url: str) -> str:
    """Without user and password."""
    parts = urlsplit(nats_url if "://" in nats_url else f"nats://{nats_url}")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
