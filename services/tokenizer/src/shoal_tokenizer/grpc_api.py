"""The gRPC edge: messages to dataclasses and back, and what is counted.

A connection of Converse owns its answers: when it breaks they are forgotten, and the gateway opens them again
elsewhere with the tokens so far. docs/decisions/0013-tokens-travel-in-batches.md
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from shoal_contracts.errors import ERRORS, BadRequest, ShoalError, to_failure
from shoal_contracts.ids import pack_u32, unpack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import tokenizer_pb2 as tpb
from shoal_contracts.v1 import tokenizer_pb2_grpc
from shoal_runtime.clock import Clock
from shoal_runtime.grpc import draining
from shoal_runtime.streams import TurnWriter, serve_stream
from shoal_tokenizer import metrics
from shoal_tokenizer.codec.api import (
    Api,
    Codec,
    Finish,
    NeedsHistory,
    RequestNames,
    Sampling,
    ShownFailure,
    Storage,
    TokenLogprob,
)
from shoal_tokenizer.codec.events.messages import write_count
from shoal_tokenizer.encode import Encoded, RequestEncoder
from shoal_tokenizer.format import AnswerStreams, Ending, Opening, Piece, Turn, format_answer

_PIECE_BYTES = 64  # of a piece beside its events

_APIS = {
    tpb.CHAT_COMPLETIONS: Api.CHAT_COMPLETIONS,
    tpb.RESPONSES: Api.RESPONSES,
    tpb.MESSAGES: Api.MESSAGES,
    tpb.COMPLETIONS: Api.COMPLETIONS,
}
_FINISHES = {
    pb.STOP: Finish.STOP,
    pb.LENGTH: Finish.LENGTH,
    pb.CANCEL: Finish.CANCEL,
    pb.FAILURE: Finish.FAILURE,
}


class TokenizerApi(tokenizer_pb2_grpc.TokenizerServicer):
    """The servicer; runs on the process's loop."""

    def __init__(self, codec: Codec, encoder: RequestEncoder, clock: Clock) -> None:
        self._codec = codec
        self._encoder = encoder
        self._clock = clock
        self._connections: set[AnswerStreams] = set()
        self._is_draining = False
        self._all_closed = asyncio.Event()

    async def drain(self) -> None:
        """Take nothing new; return when every open answer ended."""
        self._is_draining = True
        for connection in self._connections:
            connection.is_draining = True
        self._note_open()
        await self._all_closed.wait()

    async def Encode(self, request: tpb.EncodeRequest, context: Any) -> tpb.EncodeReply:
        encoded = await self._encode(request, is_count=False)
        if isinstance(encoded, NeedsHistory):
            return tpb.EncodeReply(needed_response_id=encoded.previous_response_id)
        return tpb.EncodeReply(
            model=encoded.model,
            token_ids=pack_u32(encoded.token_ids),
            sampling=to_sampling(encoded.sampling),
            stream=encoded.is_stream,
            traffic_class=pb.AGENT if encoded.is_agent else pb.CHAT,
            output_state=encoded.output_state,
            notes=encoded.notes,
            cache_key=encoded.cache_key,
            storage=to_storage(encoded.storage) if encoded.storage is not None else None,
            other_choices=[
                tpb.Choice(sampling=to_sampling(sampling), output_state=state)
                for sampling, state in encoded.other_choices
            ],
        )

    async def Count(self, request: tpb.EncodeRequest, context: Any) -> tpb.CountReply:
        encoded = await self._encode(request, is_count=True)
        if isinstance(encoded, NeedsHistory):
            raise BadRequest(pb.UNSUPPORTED, "Only whole conversations are counted.", param="previous_response_id")
        count = len(encoded.token_ids)
        return tpb.CountReply(prompt_tokens=count, body=write_count(count) if request.api == tpb.MESSAGES else b"")

    # The stubs know generators only; grpc.aio also takes a coroutine that writes to the context.
    async def Converse(  # type: ignore[override]
        self, request_iterator: AsyncIterator[tpb.ConverseRequest], context: Any
    ) -> None:
        connection = AnswerStreams(self._codec)
        connection.is_draining = self._is_draining
        writer = TurnWriter[Piece](build_replies, weigh=_weigh)

        def on_request(request: tpb.ConverseRequest) -> None:
            for piece in connection.turn(to_turn(request)):
                _count_piece(piece)
                writer.put(piece)
            self._note_open()

        self._connections.add(connection)
        try:
            await serve_stream(request_iterator, context, writer, on_request)
        finally:
            self._connections.discard(connection)
            self._note_open()

    async def Format(self, request: tpb.FormatRequest, context: Any) -> tpb.FormatReply:
        opening = Opening(0, request.output_state, request.prompt_tokens, request.hit_tokens, _ids(request.token_ids))
        receipt = request.receipt_json if request.HasField("receipt_json") else None
        ending = Ending(0, _finish(request.reason), receipt_json=receipt)
        formatted = format_answer(self._codec, opening, to_logprobs(request.logprobs), ending)
        metrics.ANSWERS.labels(ending.finish.value).inc()
        metrics.ANSWER_TOKENS.inc(formatted.completion_tokens)
        return tpb.FormatReply(
            body=formatted.body,
            completion_tokens=formatted.completion_tokens,
            stopped_early=formatted.is_stopped_early,
        )

    async def _encode(self, request: tpb.EncodeRequest, *, is_count: bool) -> Encoded | NeedsHistory:
        begin_s = self._clock.monotonic()
        try:
            if self._is_draining:
                raise draining()
            api = _APIS.get(request.api)
            if api is None:
                raise BadRequest(pb.INVALID_REQUEST, "the request names no API")
            history = request.history if request.HasField("history") else None
            names = RequestNames(request.request_id, request.created_s, history, is_count)
            encoded = await self._encoder.encode(api, request.body, names)
        except ShoalError as error:
            metrics.REQUESTS.labels(pb.ErrorCode.Name(error.code)).inc()
            raise
        metrics.REQUESTS.labels("OK").inc()
        metrics.ENCODE_SECONDS.observe(self._clock.monotonic() - begin_s)
        if isinstance(encoded, Encoded):
            metrics.PROMPT_TOKENS.observe(len(encoded.token_ids))
        return encoded

    def _note_open(self) -> None:
        count = sum(map(len, self._connections))
        metrics.ANSWERS_OPEN.set(count)
        if self._is_draining and count == 0:
            self._all_closed.set()


def to_sampling(sampling: Sampling) -> pb.Sampling:
    """None stays absent."""
    return pb.Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
        logit_bias=sampling.logit_bias,
        ignore_eos=sampling.ignore_eos,
        constraint=sampling.constraint,
    )


def to_storage(storage: Storage) -> tpb.Storage:
    return tpb.Storage(
        input_items=storage.input_items,
        is_stored=storage.is_stored,
        is_background=storage.is_background,
        previous_response_id=storage.previous_response_id,
        pending_body=storage.pending_body,
        lost_body=storage.lost_body,
    )


def to_turn(request: tpb.ConverseRequest) -> Turn:
    """BadRequest when a packed column is broken."""
    return Turn(
        opens=[
            Opening(
                o.stream_id,
                o.output_state,
                o.prompt_tokens,
                o.hit_tokens,
                _ids(o.prior_token_ids),
                o.is_resumed,
                o.prior_events,
            )
            for o in request.open
        ],
        stream_ids=_ids(request.stream_ids),
        counts=_ids(request.counts),
        token_ids=_ids(request.token_ids),
        logprobs={entry.stream_id: to_logprobs(entry.tokens) for entry in request.logprobs},
        endings=[_to_ending(finish) for finish in request.finish],
        drops=_ids(request.drop),
    )


def to_logprobs(tokens: Iterable[pb.TokenLogprobs]) -> list[TokenLogprob]:
    return [TokenLogprob(t.logprob, _ids(t.top_token_ids), t.top_logprobs) for t in tokens]


def build_replies(pieces: Sequence[Piece]) -> list[tpb.ConverseReply]:
    """One message for all pieces of a turn."""
    reply = tpb.ConverseReply()
    spoken = [piece for piece in pieces if piece.events]
    reply.stream_ids = pack_u32(piece.stream_id for piece in spoken)
    reply.lengths = pack_u32(len(piece.events) for piece in spoken)
    reply.parsed_tokens = pack_u32(piece.parsed_tokens for piece in spoken)
    reply.event_counts = pack_u32(piece.event_count for piece in spoken)
    reply.events = b"".join(piece.events for piece in spoken)
    for piece in pieces:
        if piece.stop_string is not None:
            reply.stopped.add(stream_id=piece.stream_id, stop_string=piece.stop_string)
        if piece.error is not None:
            reply.failed.add(stream_id=piece.stream_id, failure=to_failure(piece.error))
        elif piece.completion_tokens is not None:
            reply.closed.add(
                stream_id=piece.stream_id, completion_tokens=piece.completion_tokens, kept_body=piece.kept_body
            )
    return [reply]


def _weigh(piece: Piece) -> int:
    return len(piece.events) + len(piece.kept_body or b"") + _PIECE_BYTES


def _to_ending(finish: tpb.FinishStream) -> Ending:
    return Ending(
        finish.stream_id,
        _finish(finish.reason),
        _to_shown_failure(finish.failure) if finish.HasField("failure") else None,
        finish.receipt_json if finish.HasField("receipt_json") else None,
        finish.hit_tokens if finish.HasField("hit_tokens") else None,
        tuple(finish.other_choices),
    )


def _to_shown_failure(failure: pb.Failure) -> ShownFailure:
    meaning = ERRORS.get(failure.code, ERRORS[pb.BUG])
    return ShownFailure(
        code=pb.ErrorCode.Name(failure.code).lower() if failure.code in ERRORS else "bug",
        message=failure.message,
        is_callers=meaning.type is BadRequest,
        param=failure.param if failure.HasField("param") else None,
    )


def _finish(reason: pb.FinishReason.ValueType) -> Finish:
    finish = _FINISHES.get(reason)
    if finish is None:
        raise BadRequest(pb.INVALID_REQUEST, "a finish reason is missing")
    return finish


def _ids(packed: bytes) -> Sequence[int]:
    if not packed:
        return ()
    try:
        return unpack_u32(packed)
    except ValueError as error:
        raise BadRequest(pb.INVALID_REQUEST, str(error)) from error


def _count_piece(piece: Piece) -> None:
    if piece.error is not None:
        metrics.ANSWERS.labels("error").inc()
    elif piece.completion_tokens is not None and piece.finish is not None:
        metrics.ANSWERS.labels(piece.finish.value).inc()
        metrics.ANSWER_TOKENS.inc(piece.completion_tokens)
