"""Generated token ids -> events of the API, for all open answers of one connection, turn by turn.

Within a turn: opens, then tokens, then endings, then drops; what one answer says in a turn is one piece. Answers do
not know of each other: whatever goes wrong in one ends that one. Everything here is computed from what Encode wrote
into the output state and from the tokens, so another instance can go on where this one was lost.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal_contracts.errors import BadRequest, Bug, Refused, ShoalError
from shoal_contracts.v1.common_pb2 import BUG, DRAINING, INVALID_REQUEST, OVERLOADED
from shoal_runtime.logs import get_logger
from shoal_tokenizer.codec.api import AnswerEnd, AnswerShape, Codec, Finish, ShownFailure, TokenLogprob, Usage
from shoal_tokenizer.encode import STATE_VERSION

log = get_logger(__name__)

MAX_OPEN_ANSWERS = 65_536
MAX_EVENT_BYTES = 12 * 1024 * 1024  # what one answer may say at once; a gRPC message takes 16 MiB
_NO_LOGPROBS: Sequence[TokenLogprob] = ()
_unpack_shape = msgspec.msgpack.Decoder(AnswerShape).decode


@dataclass(frozen=True, slots=True)
class Opening:
    """A new answer. ``prior_ids`` are parsed without events: the client has those, opening events included."""

    stream_id: int
    output_state: bytes
    prompt_tokens: int
    hit_tokens: int
    prior_ids: Sequence[int] = ()
    is_resumed: bool = False  # the client has the opening events, also when there are no prior tokens
    prior_events: int = 0  # how many events it has


@dataclass(frozen=True, slots=True)
class Ending:
    """The last word of the engine about one answer."""

    stream_id: int
    finish: Finish
    failure: ShownFailure | None = None
    receipt_json: bytes | None = None
    hit_tokens: int | None = None  # None: as told at open
    other_choices: Sequence[bytes] = ()  # ``kept_body`` of the others, with the first of several choices


@dataclass(frozen=True, slots=True)
class Turn:
    """All that was ready at once. ``token_ids`` holds ``counts[i]`` ids for each ``stream_ids[i]``, in order."""

    opens: Sequence[Opening] = ()
    stream_ids: Sequence[int] = ()
    counts: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    logprobs: Mapping[int, Sequence[TokenLogprob]] = field(default_factory=dict)
    endings: Sequence[Ending] = ()
    drops: Sequence[int] = ()


@dataclass(slots=True)
class Piece:
    """What one answer has to say after a turn. ``completion_tokens`` or ``error`` set: it is over."""

    stream_id: int
    events: bytes = b""
    parsed_tokens: int = 0  # with so many prior tokens another instance goes on after ``events``
    event_count: int = 0
    stop_string: str | None = None
    completion_tokens: int | None = None
    kept_body: bytes | None = None
    finish: Finish | None = None
    error: ShoalError | None = None


class Answer:
    """One answer: its parser, its writer, its accounts."""

    __slots__ = ("_hit_tokens", "_is_open", "_parser", "_prompt_tokens", "_writer", "is_stop_told")

    def __init__(self, codec: Codec, output_state: bytes, prompt_tokens: int, hit_tokens: int) -> None:
        shape = _read_state(output_state)
        if shape.model != codec.model or shape.api not in codec.writers:
            raise BadRequest(INVALID_REQUEST, "output_state was written for another model")
        self._parser = codec.new_parser(shape)
        self._writer = codec.writers[shape.api](shape)
        self._prompt_tokens = prompt_tokens
        self._hit_tokens = hit_tokens
        self._is_open = False
        self.is_stop_told = False

    def resume(self, prior_ids: Sequence[int], prior_events: int) -> None:
        """Go on after events that the client already has."""
        self._open()
        self.push(prior_ids)
        self._writer.events = max(self._writer.events, prior_events)

    @property
    def stop_string(self) -> str | None:
        return self._parser.stop_string

    @property
    def completion_tokens(self) -> int:
        return self._parser.completion_tokens

    @property
    def events(self) -> int:
        """How many came out, those that the client had before included."""
        return self._writer.events

    @property
    def kept_body(self) -> bytes | None:
        """The final object, after ``finish``, where the request wants it kept."""
        return self._writer.kept_body

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = _NO_LOGPROBS) -> bytes:
        """Events of new tokens. After a stop string there are none."""
        if self._parser.stop_string is not None or not token_ids:
            return b""
        return self._open() + self._writer.delta(self._parser.push(token_ids, logprobs))

    def finish(self, ending: Ending) -> tuple[bytes, Finish]:
        """The last events and what the answer ended with. A stop string had the last word already."""
        finish = Finish.STOP if self._parser.stop_string is not None else ending.finish
        rest = self._parser.close(is_cut=finish is not Finish.STOP)
        events = self._writer.delta(rest) if rest.parts or rest.tokens else b""
        if finish is Finish.CANCEL:
            return events + self._writer.cancel(), finish
        if finish is Finish.FAILURE:
            failure = ending.failure or ShownFailure("bug", "the answer ended without a reason", is_callers=False)
            return events + self._writer.fail(failure, ending.receipt_json), finish
        hit_tokens = self._hit_tokens if ending.hit_tokens is None else ending.hit_tokens
        parser = self._parser
        usage = Usage(self._prompt_tokens, hit_tokens, parser.completion_tokens, parser.reasoning_tokens)
        end = AnswerEnd(finish, usage, parser.stop_string, ending.receipt_json, ending.other_choices)
        return self._open() + events + self._writer.finish(end), finish

    def _open(self) -> bytes:
        if self._is_open:
            return b""
        self._is_open = True
        return self._writer.open(self._prompt_tokens, self._hit_tokens)


class AnswerStreams:
    """The open answers of one connection. Used by its handler only, on the loop; nothing survives the connection."""

    def __init__(self, codec: Codec, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._codec = codec
        self._max_event_bytes = max_event_bytes
        self._answers: dict[int, Answer] = {}
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._answers)

    def turn(self, turn: Turn) -> list[Piece]:
        """Raises BadRequest when the columns do not fit each other: then nothing was done and the sender is broken."""
        if len(turn.stream_ids) != len(turn.counts) or sum(turn.counts) != len(turn.token_ids):
            raise BadRequest(INVALID_REQUEST, "columns of unequal length")
        pieces: dict[int, Piece] = {}
        for opening in turn.opens:
            self._guard(opening.stream_id, pieces, self._open, opening)
        start = 0
        logprobs = turn.logprobs
        for stream_id, count in zip(turn.stream_ids, turn.counts, strict=True):
            answer = self._answers.get(stream_id)
            if answer is not None:
                ids = turn.token_ids[start : start + count]
                self._guard(stream_id, pieces, self._push, (answer, ids, logprobs.get(stream_id, _NO_LOGPROBS)))
            start += count
        for ending in turn.endings:
            if ending.stream_id in self._answers:
                self._guard(ending.stream_id, pieces, self._finish, ending)
        for stream_id in turn.drops:
            self._answers.pop(stream_id, None)
            pieces.pop(stream_id, None)
        return [piece for piece in pieces.values() if self._is_worth_saying(piece)]

    def _guard(
        self, stream_id: int, pieces: dict[int, Piece], step: Callable[[Piece, Any], None], argument: object
    ) -> None:
        """Run one step of one answer. An answer is a request, and this is its boundary: its crash is its own."""
        piece = pieces.get(stream_id)
        if piece is None:
            piece = pieces[stream_id] = Piece(stream_id)
        try:
            step(piece, argument)
            if len(piece.events) + len(piece.kept_body or b"") <= self._max_event_bytes:
                return
            piece.events, piece.kept_body = b"", None
            piece.error = BadRequest(INVALID_REQUEST, "The answer is too long for one body. Ask for a stream instead.")
        except ShoalError as error:
            piece.error = error
        except Exception as error:
            log.error("answer.crashed", exc_info=error)
            piece.error = Bug(BUG, "an internal error; it was logged")
        self._answers.pop(stream_id, None)

    def _open(self, piece: Piece, opening: Opening) -> None:
        if self.is_draining:
            raise Refused(DRAINING, "this instance is leaving; another one will take the answer")
        if len(self._answers) >= MAX_OPEN_ANSWERS:
            raise Refused(OVERLOADED, "too many answers are open on this connection", retry_after_s=1)
        if opening.stream_id in self._answers:
            raise BadRequest(INVALID_REQUEST, "a stream number was used twice")
        answer = Answer(self._codec, opening.output_state, opening.prompt_tokens, opening.hit_tokens)
        self._answers[opening.stream_id] = answer
        if opening.is_resumed or opening.prior_ids:
            answer.resume(opening.prior_ids, opening.prior_events)
        self._tell_stop(piece, answer)

    def _push(self, piece: Piece, argument: tuple[Answer, Sequence[int], Sequence[TokenLogprob]]) -> None:
        answer, token_ids, logprobs = argument
        before = answer.events
        piece.events += answer.push(token_ids, logprobs)
        piece.event_count += answer.events - before
        piece.parsed_tokens = answer.completion_tokens
        self._tell_stop(piece, answer)

    def _finish(self, piece: Piece, ending: Ending) -> None:
        answer = self._answers[ending.stream_id]
        before = answer.events
        events, piece.finish = answer.finish(ending)
        piece.events += events
        piece.event_count += answer.events - before
        piece.kept_body = answer.kept_body
        piece.parsed_tokens = piece.completion_tokens = answer.completion_tokens
        del self._answers[ending.stream_id]

    @staticmethod
    def _tell_stop(piece: Piece, answer: Answer) -> None:
        if answer.stop_string is not None and not answer.is_stop_told:
            answer.is_stop_told = True
            piece.stop_string = answer.stop_string

    @staticmethod
    def _is_worth_saying(piece: Piece) -> bool:
        return bool(piece.events or piece.stop_string or piece.completion_tokens is not None or piece.error)


@dataclass(frozen=True, slots=True)
class Formatted:
    """One whole answer."""

    body: bytes
    completion_tokens: int
    is_stopped_early: bool


def format_answer(codec: Codec, opening: Opening, logprobs: Sequence[TokenLogprob], ending: Ending) -> Formatted:
    """All events, or the body, of an answer that is complete; ``prior_ids`` of ``opening`` are its tokens."""
    if ending.finish not in (Finish.STOP, Finish.LENGTH):
        raise BadRequest(INVALID_REQUEST, "only an answer that ended with stop or length can be formatted")
    answer = Answer(codec, opening.output_state, opening.prompt_tokens, opening.hit_tokens)
    begin = answer.push(opening.prior_ids, logprobs)
    end, _finish = answer.finish(ending)
    return Formatted(begin + end, answer.completion_tokens, answer.stop_string is not None)


def _read_state(output_state: bytes) -> AnswerShape:
    if output_state[:1] == STATE_VERSION:
        try:
            return _unpack_shape(output_state[1:])
        except msgspec.MsgspecError:
            pass
    raise BadRequest(INVALID_REQUEST, "output_state was not written by this version of the tokenizer")
