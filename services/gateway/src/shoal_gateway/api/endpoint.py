"""The POST endpoints: one HTTP exchange around one Lifecycle, or around a count of tokens.

The request boundary: whatever leaves the work becomes what the client is told; an exception that is no ShoalError is
a Bug, logged here with its traceback and told without any text of it. A closing gateway cancels what takes too long:
those clients are told so before their connections end.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from shoal_contracts.errors import BadRequest, Bug, Interrupted, Refused, ShoalError
from shoal_contracts.ids import new_request_id
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.lifecycle import Lifecycle, River
from shoal_gateway.ports import TokenizerFleet
from shoal_gateway.presence import BodyRoom, ClientConnection, PresenceLimits, Receive, Send, too_large
from shoal_gateway.request import Api, BodyToEncode, Options
from shoal_runtime.logs import bind_context, get_logger
from shoal_runtime.tracing import extract, start_span

log = get_logger(__name__)

HELD_BODIES = 32  # of full size
TELL_LEAVING_S = 0.4

Work = Callable[[ClientConnection, Options], Awaitable[None]]


def answer_work(river: River) -> Work:
    """Any of the four APIs: the whole river."""

    async def work(client: ClientConnection, options: Options) -> None:
        await Lifecycle(river, client, options).run()

    return work


def count_work(tokenizers: TokenizerFleet) -> Work:
    """How many tokens a prompt would have; asks nobody but a tokenizer, which bounds what it takes."""

    async def work(client: ClientConnection, options: Options) -> None:
        await client.read_body()
        await client.while_present(_count(tokenizers, client, options))

    return work


async def _count(tokenizers: TokenizerFleet, client: ClientConnection, options: Options) -> None:
    counted = await tokenizers.count(BodyToEncode(options.api, client.body, options.request_id))
    client.put(counted)
    await client.end(None)


class Exchanges:
    """What the endpoints share: how long a client may take, and how much of all bodies may be here."""

    def __init__(self, limits: PresenceLimits) -> None:
        self.limits = limits
        self.room = BodyRoom(HELD_BODIES * limits.max_body_bytes)


class Endpoint:
    """A raw ASGI endpoint: tokens are worth the microseconds that response objects cost.

    What clients send of keys and versions (``authorization``, ``x-api-key``, ``anthropic-version``) is accepted unread.
    """

    def __init__(self, path: str, api: Api, exchanges: Exchanges, work: Work) -> None:
        self.path = path
        self._api = api
        self._exchanges = exchanges
        self._work = work

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        options = Options(new_request_id(), self._api, wants_receipt=headers.get("x-shoal-receipt") == "1")
        limits = self._exchanges.limits
        client = ClientConnection(receive, send, options, limits, self._exchanges.room, _abort_of(scope))
        with bind_context(request_id=options.request_id), start_span(f"POST {self.path}", extract(headers)):
            try:
                _check_head(headers, limits.max_body_bytes)
                await self._work(client, options)
            except ShoalError as error:
                if isinstance(error, Bug):
                    log.error("request.crashed", exc_info=error)
                await _tell(client, error)
            except asyncio.CancelledError:
                await _tell_leaving(client)
                raise
            except Exception as error:
                log.error("request.crashed", exc_info=error)
                await _tell(client, Bug(pb.BUG, "an internal error; it was logged"))
            finally:
                client.close()


async def _tell(client: ClientConnection, error: ShoalError) -> None:
    try:
        await client.fail(error)
    except Interrupted:
        return  # the connection was cut because the client does not read


async def _tell_leaving(client: ClientConnection) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TELL_LEAVING_S):
            await _tell(client, Refused(pb.DRAINING, "this gateway is leaving; try again", retry_after_s=1))


def _check_head(headers: dict[str, str], max_body_bytes: int) -> None:
    """Refuse what says that it is compressed or too large before any of it is read."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise BadRequest(pb.UNSUPPORTED, "Compressed bodies are not supported: send the JSON without content-encoding.")
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_body_bytes:
        raise too_large(max_body_bytes)


def _abort_of(scope: Any) -> Callable[[], None]:
    abort: Callable[[], None] = scope.get("extensions", {}).get("shoal.abort", lambda: None)
    return abort
