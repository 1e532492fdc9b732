"""Request body -> token ids and everything later stages need of it.

Parsing, rendering and encoding run on a thread of the pool; one request is one piece of work there, so a long prompt
never holds up the loop that formats answers. The same body under the same names gives the same reply on any instance.
"""

from dataclasses import dataclass

import msgspec

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1.common_pb2 import UNSUPPORTED
from shoal_tokenizer.codec.api import AnswerShape, Api, Codec, RequestNames, Sampling
from shoal_tokenizer.thread_pool import ThreadPool

STATE_VERSION = b"\x01"
_pack_shape = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Encoded:
    """A request as the rest of the river needs it."""

    model: str
    token_ids: list[int]
    sampling: Sampling
    is_stream: bool
    is_agent: bool
    output_state: bytes


class RequestEncoder:
    """Called by the gRPC edge, on its loop."""

    def __init__(self, codec: Codec, pool: ThreadPool) -> None:
        self._codec = codec
        self._pool = pool

    async def encode(self, api: Api, body: bytes, names: RequestNames) -> Encoded:
        """Raises BadRequest, and Refused when all threads and places are taken."""
        return await self._pool.run(lambda: self._encode(api, body, names))

    def _encode(self, api: Api, body: bytes, names: RequestNames) -> Encoded:
        codec = self._codec
        converter = codec.converters.get(api)
        if converter is None:
            raise BadRequest(UNSUPPORTED, f"The {api.value} API is not offered for the model '{codec.model}'.")
        converted = converter.convert(body, names)
        segments = codec.renderer.render(converted.conversation, names.created_s)
        return Encoded(
            model=codec.model,
            token_ids=codec.encoder.encode(segments),
            sampling=converted.sampling,
            is_stream=converted.shape.is_stream,
            is_agent=converted.is_agent,
            output_state=pack_state(converted.shape),
        )


def pack_state(shape: AnswerShape) -> bytes:
    """What Encode hands to Converse through the gateway: a version byte and the shape."""
    return STATE_VERSION + _pack_shape(shape)
