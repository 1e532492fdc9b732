"""What changes the course of an answer; its stream takes them one by one, in the order in which they came."""

from dataclasses import dataclass

from shoal_contracts.errors import ShoalError
from shoal_gateway.ports import EndReason


@dataclass(frozen=True, slots=True)
class Finished:
    """The decode worker has generated the last token, or says why not."""

    reason: EndReason
    failure: ShoalError | None


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The connection to the decode worker broke."""

    error: ShoalError


@dataclass(frozen=True, slots=True)
class TokenizerLost:
    """No more events come from that tokenizer."""

    error: ShoalError


@dataclass(frozen=True, slots=True)
class Stopped:
    """By a stop string."""


@dataclass(frozen=True, slots=True)
class Closed:
    """Every event is out. ``kept_body``: what is to be kept of the answer."""

    completion_tokens: int
    kept_body: bytes | None


@dataclass(frozen=True, slots=True)
class ClientTooSlow:
    """Too many events wait for it."""


@dataclass(frozen=True, slots=True)
class OtherAnswers:
    """Every other answer to the prompt is complete. ``kept`` is what the tokenizer wants back of each."""

    kept: tuple[bytes, ...] = ()
    completion_tokens: int = 0


Signal = Finished | WorkerLost | TokenizerLost | Stopped | Closed | ClientTooSlow | OtherAnswers
