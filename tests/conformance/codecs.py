"""A codec without a service around it: which prompt a body becomes, which stream an answer."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal_tokenizer.codec.api import (
    AnswerEnd,
    AnswerStart,
    Api,
    Codec,
    Converted,
    EventWriter,
    Finish,
    OutputParser,
    RequestNames,
    Usage,
)
from shoal_tokenizer.codec.conversation import RawText

NOW_S = 1_790_000_000
APIS = {
    "/v1/chat/completions": Api.CHAT_COMPLETIONS,
    "/v1/responses": Api.RESPONSES,
    "/v1/messages": Api.MESSAGES,
    "/v1/completions": Api.COMPLETIONS,
}


def api_of(path: str) -> Api:
    return APIS[path.partition("?")[0]]


def converted(codec: Codec, api: Api, body: Mapping[str, Any]) -> Converted:
    """Raises BadRequest, as the API does."""
    result = codec.converters[api].convert(json.dumps(body).encode(), RequestNames("r1", NOW_S, history=b"[]"))
    assert isinstance(result, Converted)
    return result


def token_ids(codec: Codec, api: Api, body: Mapping[str, Any]) -> list[int]:
    """The prompt of a body; raises BadRequest."""
    prompt = converted(codec, api, body).prompt
    if isinstance(prompt, RawText):
        return codec.encoder.encode(codec.renderer.render_raw(prompt.text))
    return codec.encoder.encode(codec.renderer.render(prompt, NOW_S).segments)


def stream_of(codec: Codec, speaker: Codec, api: Api, body: Mapping[str, Any], answer: Sequence[int]) -> bytes:
    """The stream that ``codec`` makes of an answer that was generated in the tokens of ``speaker``."""
    shape = converted(codec, api, body).shape
    writer = codec.writers[api](shape)
    parser = speaker.new_parser(msgspec.structs.replace(shape, start=AnswerStart.REASONING))
    raw = writer.open(1, 0) + _said(parser, writer, answer)
    usage = Usage(1, 0, parser.completion_tokens, parser.reasoning_tokens)
    return raw + writer.finish(AnswerEnd(Finish.STOP, usage))


def _said(parser: OutputParser, writer: EventWriter, answer: Sequence[int]) -> bytes:
    raw = b"".join(writer.delta(parser.push([token_id], ())) for token_id in answer)
    return raw + writer.delta(parser.close())


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for length, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return length
    return min(len(one), len(other))
