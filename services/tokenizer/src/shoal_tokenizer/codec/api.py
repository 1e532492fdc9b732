"""The seams of the tokenizer: what a model family and a public API have to bring, each as one small part.

    body ─ RequestConverter ─► Conversation ─ PromptRenderer ─► segments ─ SegmentEncoder ─► token ids
    token ids ─ OutputParser ─► Delta ─ EventWriter ─► bytes for the client

Converters and writers belong to an API, renderers, encoders and parsers to a model family; ``Codec`` joins them for
one model. Parts of the request side are shared between threads and keep no state; a parser and a writer belong to
one answer. What the caller did wrong is raised as ``BadRequest``.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import msgspec


class Api(enum.Enum):
    """The public APIs, by the names of the wire enum."""

    CHAT_COMPLETIONS = "Chat Completions"
    RESPONSES = "Responses"
    MESSAGES = "Messages"
    COMPLETIONS = "Completions"


class Finish(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCEL = "cancel"
    FAILURE = "failure"


Segment: TypeAlias = tuple[str, bool]  # text; whether control tokens are recognised in it


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is put into the prompt: messages and tools in the form that chat templates read."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(slots=True)
class Sampling:
    """How tokens are chosen. None: the model's own default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    ignore_eos: bool = False


class AnswerShape(msgspec.Struct, frozen=True, array_like=True):
    """How the answer has to look; all that Converse needs of a request, and nothing of its text."""

    api: Api
    response_id: str
    created_s: int
    model: str
    is_stream: bool
    stop_strings: tuple[str, ...] = ()
    has_usage_event: bool = False
    has_logprobs: bool = False
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Converted:
    """A request after validation."""

    conversation: Conversation
    sampling: Sampling
    shape: AnswerShape
    is_agent: bool  # uses tools: its blocks live as an agent's


@dataclass(frozen=True, slots=True)
class RequestNames:
    """What the gateway decides about a request's identity; ids and times in the answer derive from it."""

    request_id: str
    created_s: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Of one generated token, as the engine reported it."""

    logprob: float
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token with its log probability, ready for display."""

    spelling: bytes
    logprob: float
    top: list[tuple[bytes, float]]


@dataclass(slots=True)
class Delta:
    """What new tokens add to an answer. ``tokens`` stays empty unless log probabilities were asked for."""

    text: str = ""
    tokens: list[ShownToken] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer."""

    prompt_tokens: int
    hit_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class ShownFailure:
    """A failure as the client is told."""

    code: str
    message: str
    is_callers: bool
    param: str | None = None


class RequestConverter(Protocol):
    """Body of one API's request -> conversation."""

    def convert(self, body: bytes, names: RequestNames) -> Converted: ...


class PromptRenderer(Protocol):
    """Conversation -> prompt. What a caller typed never lies in a segment that allows control tokens."""

    def render(self, conversation: Conversation, now_s: int) -> list[Segment]: ...


class SegmentEncoder(Protocol):
    """Segments -> token ids."""

    def encode(self, segments: Sequence[Segment]) -> list[int]: ...


class OutputParser(Protocol):
    """Generated token ids of one answer -> deltas. Withholds a bounded amount of text."""

    stop_string: str | None  # set once one was found; what is pushed later is ignored
    completion_tokens: int

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Delta: ...

    def close(self) -> Delta:
        """The rest that was withheld in the hope of more."""


class EventWriter(Protocol):
    """Deltas of one answer -> bytes in the form of its API; empty while there is nothing to say."""

    def resume(self) -> None:
        """The client has the opening events already: they do not come out again."""

    def delta(self, delta: Delta) -> bytes: ...

    def finish(self, finish: Finish, usage: Usage, receipt_json: bytes | None) -> bytes: ...

    def fail(self, failure: ShownFailure, receipt_json: bytes | None) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Codec:
    """All parts for one served model."""

    model: str
    converters: Mapping[Api, RequestConverter]
    renderer: PromptRenderer
    encoder: SegmentEncoder
    new_parser: Callable[[AnswerShape], OutputParser]
    writers: Mapping[Api, Callable[[AnswerShape], EventWriter]]
