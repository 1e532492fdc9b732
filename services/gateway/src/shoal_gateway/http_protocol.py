"""One public HTTP/1.1 connection: uvicorn's protocol, and what it lacks towards strangers.

What is no HTTP is told in the shape of every other error. Nobody holds a connection without using it: a head that
does not arrive and bytes that are not read are cut after ``patience_s``. One request at a time: what a client sends
behind a request that still runs is dropped and the connection closed after the answer, as HTTP allows; reading goes
on, so that a client that leaves is seen. Offers to upgrade are ignored (parser and body would be lost otherwise;
some clients offer HTTP/2 with every request). A request can cut its own connection through the scope's
``shoal.abort``: closing would first wait for a client that does not read.
"""

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.error_shapes import error_response

_UPGRADE_WORDS = {b"upgrade", b"http2-settings"}


class _SentTooEarly(Exception):
    """Another request came while one runs; ends the parser's work."""


class HttpProtocol(HttpToolsProtocol):
    """Made by uvicorn for each connection; used on the loop."""

    patience_s = 30.0
    _cut: asyncio.TimerHandle | None = None
    _is_deaf = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._cut_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._unset_keepalive_if_required()
        if not self._is_answering:
            self._cut_later()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._go_on_without_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("The request is not valid HTTP/1.1.")

    def on_message_begin(self) -> None:
        if self._is_answering:
            raise _SentTooEarly
        super().on_message_begin()
        self.scope["extensions"] = {"shoal.abort": self.transport.abort}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._keep()
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._cut_later()

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Before an answer has begun. While one runs, nothing may be written between: it is the last then."""
        if self._is_answering and (self.cycle.response_started or not self.cycle.more_body):
            self._is_deaf = True
            self.cycle.keep_alive = False
            self.flow.resume_reading()
            return
        status, body, _headers = error_response(BadRequest(pb.INVALID_REQUEST, msg))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
        self._cut_later()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Parse the head once more without the offer, and then the rest as the body that it is."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("This is no proxy.")
            return
        head = [b"%s %s HTTP/%s\r\n" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(word for word in value.split(b",") if word.strip().lower() not in _UPGRADE_WORDS)
            if name not in _UPGRADE_WORDS:
                head.append(b"%s: %s\r\n" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join(head) + b"\r\n" + rest)

    def _cut_later(self) -> None:
        if self._cut is None:
            self._cut = self.loop.call_later(self.patience_s, self.transport.abort)

    def _keep(self) -> None:
        if self._cut is not None:
            self._cut.cancel()
            self._cut = None
