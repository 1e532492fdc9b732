"""The seams of the tokenizer: what a model family and a public API have to bring, each as one small part.

    body ─ RequestConverter ─► Conversation ─ PromptRenderer ─► segments ─ SegmentEncoder ─► token ids
    token ids ─ OutputParser ─► Delta ─ EventWriter ─► bytes for the client

Converters and writers belong to an API, renderers, encoders and parsers to a model family; ``Codec`` joins them for
one model. Parts of the request side are shared between threads and keep no state; a parser and a writer belong to
one answer. What the caller did wrong is raised as ``BadRequest``.
docs/decisions/0014-one-owner-for-each-grammar.md, docs/decisions/0031-one-conversation-between-apis-and-families.md
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import msgspec

from shoal_tokenizer.codec.conversation import Conversation, RawText


class Api(enum.Enum):
    """The public APIs, by the names of the wire enum."""

    CHAT_COMPLETIONS = "Chat Completions"
    RESPONSES = "Responses"
    MESSAGES = "Messages"
    COMPLETIONS = "Completions"


class Finish(enum.Enum):
    """Why an answer ended. A writer that saw a tool call tells STOP in its API's word for that."""

    STOP = "stop"
    LENGTH = "length"
    CANCEL = "cancel"
    FAILURE = "failure"


Segment: TypeAlias = tuple[str, bool]  # text; whether control tokens are recognised in it


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
    # What the engine may generate at all: a structural tag as JSON, docs/decisions/0032. None: anything.
    constraint: str | None = None


class AnswerStart(enum.Enum):
    """In which part of an answer the first generated token lies; the prompt's end decides."""

    TEXT = "text"
    REASONING = "reasoning"
    CALLS = "calls"  # the prompt already opened the block of tool calls


class AnswerShape(msgspec.Struct, frozen=True, array_like=True):
    """How the answer has to look; all that Converse needs of a request.

    ``echo`` is what the Responses API repeats of the request in its answer, as JSON; nothing else of the prompt is
    in here.
    """

    api: Api
    response_id: str
    created_s: int
    model: str
    is_stream: bool
    stop_strings: tuple[str, ...] = ()
    has_usage_event: bool = False
    has_logprobs: bool = False
    top_logprobs: int = 0
    start: AnswerStart = AnswerStart.TEXT
    has_tools: bool = False  # False: what looks like a tool call is text
    custom_tools: tuple[str, ...] = ()  # called with one text, which the family sees as {"input": text}
    namespaces: dict[str, tuple[str, str]] = {}  # name as the family sees it -> (namespace, name)
    echo: bytes = b"{}"
    is_reasoning_shown: bool = True  # False: Messages carries it in the signature alone
    is_kept: bool = False  # Responses: the final object is wanted for the store
    # The tools' names, and of each the parameters whose value is a text; for formats that write values without quotes.
    text_parameters: dict[str, tuple[str, ...]] = {}


@dataclass(frozen=True, slots=True)
class Storage:
    """What the gateway has to keep of a Responses request; all JSON, opaque to it.

    ``pending_body`` is the response while it is generated, ``lost_body`` what is told of one whose gateway died.
    """

    input_items: bytes
    is_stored: bool
    is_background: bool
    previous_response_id: str | None
    pending_body: bytes
    lost_body: bytes


@dataclass(frozen=True, slots=True)
class Converted:
    """A request after validation. ``notes`` tell what was changed or has no effect here, for the route receipt."""

    prompt: Conversation | RawText
    sampling: Sampling
    shape: AnswerShape
    is_agent: bool  # uses tools: its blocks live as an agent's
    notes: tuple[str, ...] = ()
    cache_key: str | None = None
    storage: Storage | None = None


@dataclass(frozen=True, slots=True)
class NeedsHistory:
    """The body goes on with a stored response: nothing can be converted before its items are there."""

    previous_response_id: str


@dataclass(frozen=True, slots=True)
class RequestNames:
    """What the gateway decides about a request; ids and times in the answer derive from it.

    ``history`` has the items of the response that the body goes on with, a JSON array; None: not asked for yet.
    ``is_count``: only the prompt matters, fields of the answer may be missing.
    """

    request_id: str
    created_s: int
    history: bytes | None = None
    is_count: bool = False


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


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call with this name begins; arguments follow. Writers number calls and make their ids."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON object of the arguments of the call that is open."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of the open call are complete. Missing where the answer was cut inside of them."""


Part: TypeAlias = Text | Reasoning | CallBegin | CallArguments | CallEnd


@dataclass(slots=True)
class Delta:
    """What new tokens add to an answer, in order; neighbours of one kind are one part, empty ones are left out.

    ``tokens`` are those of ``Text`` parts; empty unless log probabilities were asked for.
    """

    parts: list[Part] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What it adds to the answer proper."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer. ``reasoning_tokens`` are part of ``completion_tokens``."""

    prompt_tokens: int
    hit_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How an answer ended well. ``stop_string``: with STOP, which one was found."""

    finish: Finish
    usage: Usage
    stop_string: str | None = None
    receipt_json: bytes | None = None


@dataclass(frozen=True, slots=True)
class ShownFailure:
    """A failure as the client is told. ``code`` is the name of the error code in small letters."""

    code: str
    message: str
    is_callers: bool
    param: str | None = None


class RequestConverter(Protocol):
    """Body of one API's request -> conversation. ``NeedsHistory`` from Responses only."""

    def convert(self, body: bytes, names: RequestNames) -> Converted | NeedsHistory: ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and what the way it was rendered means for the answer.

    ``fixed`` holds sampling fields by name that the model's mode dictates, whatever the caller asked for; ``least``
    those that it raises where less was asked for. ``constraint`` is for ``Sampling``. ``notes`` as in ``Converted``.
    """

    segments: list[Segment]
    start: AnswerStart = AnswerStart.TEXT
    text_parameters: dict[str, tuple[str, ...]] = field(default_factory=dict)  # for ``AnswerShape``
    constraint: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class PromptRenderer(Protocol):
    """Conversation -> prompt. What a caller typed never lies in a segment that allows control tokens."""

    def render(self, conversation: Conversation, now_s: int) -> Rendered: ...

    def render_raw(self, text: str) -> list[Segment]:
        """A text to go on with, without any conversation around it."""


class SegmentEncoder(Protocol):
    """Segments -> token ids."""

    def encode(self, segments: Sequence[Segment]) -> list[int]: ...


class OutputParser(Protocol):
    """Generated token ids of one answer -> deltas. Withholds a bounded amount of text.

    What comes out, put together, depends on the tokens only, never on how they were batched.
    """

    stop_string: str | None  # set once one was found; what is pushed later is ignored
    completion_tokens: int
    reasoning_tokens: int

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Delta: ...

    def close(self) -> Delta:
        """The rest that was withheld in the hope of more."""


class EventWriter(Protocol):
    """Deltas of one answer -> bytes in the form of its API; empty while there is nothing to say.

    ``events`` counts the events that came out, so that another instance can go on numbering. ``kept_body`` is the
    final object, set by ``finish`` and ``fail`` where the shape wants it kept.
    """

    events: int
    kept_body: bytes | None

    def open(self, prompt_tokens: int, hit_tokens: int) -> bytes:
        """The events before the first delta; once, before everything else."""

    def delta(self, delta: Delta) -> bytes: ...

    def finish(self, end: AnswerEnd) -> bytes: ...

    def cancel(self) -> bytes:
        """The caller of a background answer cancelled it; others who cancel are gone and hear nothing."""

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
