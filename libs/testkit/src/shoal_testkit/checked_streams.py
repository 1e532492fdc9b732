"""HTTP clients for the SDKs whose every stream goes through the grammar checker of its API."""

from collections.abc import Iterator
from typing import Any

from shoal_testkit.grammars import check_stream


class Streams:
    """What clients read, for the checker. One that a client broke off has no end and is not checked."""

    def __init__(self) -> None:
        self.whole: list[tuple[str, bytes]] = []

    def keep(self, path: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
        kept = bytearray()
        for piece in pieces:
            kept += piece
            yield piece
        self.whole.append((path, bytes(kept)))

    def check(self) -> None:
        for path, raw in self.whole:
            check_stream(path, raw)


def keeping(library: Any, streams: Streams) -> Any:
    """A client of ``library``, which is httpx or its successor: the two SDKs do not take the same one."""

    class Kept(library.SyncByteStream):  # type: ignore[misc]
        def __init__(self, path: str, stream: Any) -> None:
            self._stream = stream
            self._pieces = streams.keep(path, iter(stream))

        def __iter__(self) -> Iterator[bytes]:
            return self._pieces

        def close(self) -> None:
            self._stream.close()

    class Transport(library.HTTPTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            response = super().handle_request(request)
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                response.stream = Kept(request.url.path, response.stream)
            return response

    return library.Client(transport=Transport(), trust_env=False, timeout=30)
