"""Request body -> token ids and everything later stages need of it.

Parsing, rendering and encoding run on a thread of the pool; one request is one piece of work there, so a long prompt
never holds up the loop that formats answers. The same body under the same names gives the same reply on any instance.
"""

from dataclasses import dataclass, replace

import msgspec

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1.common_pb2 import INVALID_REQUEST, UNSUPPORTED
from shoal_tokenizer.codec.api import (
    AnswerShape,
    Api,
    Codec,
    Converted,
    NeedsHistory,
    Rendered,
    RequestNames,
    Sampling,
    Storage,
)
from shoal_tokenizer.codec.conversation import RawText
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
    notes: tuple[str, ...] = ()
    cache_key: str | None = None
    storage: Storage | None = None
    other_choices: tuple[tuple[Sampling, bytes], ...] = ()  # of each further answer: sampling and output state


class RequestEncoder:
    """Called by the gRPC edge, on its loop."""

    def __init__(self, codec: Codec, pool: ThreadPool) -> None:
        self._codec = codec
        self._pool = pool

    async def encode(self, api: Api, body: bytes, names: RequestNames) -> Encoded | NeedsHistory:
        """Raises BadRequest, and Refused when all threads and places are taken."""
        return await self._pool.run(lambda: self._encode_within_depth(api, body, names))

    def _encode_within_depth(self, api: Api, body: bytes, names: RequestNames) -> Encoded | NeedsHistory:
        """Schemas and arguments are walked by many; whichever of them meets the bottom first."""
        try:
            return self._encode(api, body, names)
        except RecursionError:
            raise BadRequest(INVALID_REQUEST, "The body is nested too deeply.") from None

    def _encode(self, api: Api, body: bytes, names: RequestNames) -> Encoded | NeedsHistory:
        codec = self._codec
        converter = codec.converters.get(api)
        if converter is None:
            raise BadRequest(UNSUPPORTED, f"The {api.value} API is not offered for the model '{codec.model}'.")
        converted = converter.convert(body, names)
        if isinstance(converted, NeedsHistory):
            return converted
        rendered = self._render(converted, names)
        shape = msgspec.structs.replace(
            converted.shape,
            start=rendered.start,
            text_parameters=rendered.text_parameters,
            choices=converted.choices,
        )
        sampling, sampling_notes = dictate(converted.sampling, rendered)
        sampling = replace(sampling, constraint=rendered.constraint)
        return Encoded(
            model=codec.model,
            token_ids=codec.encoder.encode(rendered.segments),
            sampling=sampling,
            is_stream=shape.is_stream,
            is_agent=converted.is_agent,
            output_state=pack_state(shape),
            notes=converted.notes + rendered.notes + sampling_notes,
            cache_key=converted.cache_key,
            storage=converted.storage,
            other_choices=tuple(_choice(sampling, shape, number) for number in range(1, converted.choices)),
        )

    def _render(self, converted: Converted, names: RequestNames) -> Rendered:
        renderer = self._codec.renderer
        if isinstance(converted.prompt, RawText):
            return Rendered(renderer.render_raw(converted.prompt.text))
        return renderer.render(converted.prompt, names.created_s)


def dictate(sampling: Sampling, rendered: Rendered) -> tuple[Sampling, tuple[str, ...]]:
    """Sampling as the model's mode has it, and a note on each value that the caller would not expect."""
    dictated = dict(rendered.fixed)
    for name, least in rendered.least.items():
        asked = getattr(sampling, name)
        if asked is not None and asked < least:
            dictated[name] = least
    changed = {name: getattr(sampling, name) for name in dictated}
    notes = tuple(
        f"{name}: {asked} was asked for, this model in this mode takes {dictated[name]}"
        for name, asked in changed.items()
        if asked is not None and asked != dictated[name]
    )
    return replace(sampling, **dictated), notes


def _choice(sampling: Sampling, shape: AnswerShape, number: int) -> tuple[Sampling, bytes]:
    """A further answer. With a seed each choice has its own, or all would be equal."""
    seed = None if sampling.seed is None else (sampling.seed + number) % 2**63
    return replace(sampling, seed=seed), pack_state(msgspec.structs.replace(shape, choice=number))


def pack_state(shape: AnswerShape) -> bytes:
    """What Encode hands to Converse through the gateway: a version byte and the shape."""
    return STATE_VERSION + _pack_shape(shape)
