"""CPU that the tokenizer's side of a stream costs a token, for each API and both codecs.

64 answers at once, one token of each a turn: the message is read, parsed into parts, written as events, and the reply
is packed; no network. DeepSeek's codec is compared with deepseek-recipe's own events, token by token; that of chat
templates with decoding alone and one JSON object a token.
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import msgspec
from rows import Row
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import tokenizer_pb2 as tpb
from shoal_testkit.chat_models import CHAT_MODELS
from shoal_testkit.deepseek_tokenizer import write_v4
from shoal_tokenizer.codec.api import AnswerStart, Api, Codec, Converted, RequestNames
from shoal_tokenizer.encode import pack_state
from shoal_tokenizer.format import AnswerStreams
from shoal_tokenizer.grpc_api import build_replies, to_turn
from shoal_tokenizer.model_files import load_codec

STREAMS = 64
TOKENS = 256
ROUNDS = 5
MODEL = "served"
TEXT = (
    "They ask me how tides come about, so I think of the moon first.</think>"
    + ("The moon pulls at the sea, and the sea follows: twice a day it rises 1.5 metres and falls again. ") * 20
)
BODIES: dict[Api, dict[str, Any]] = {
    Api.CHAT_COMPLETIONS: {"messages": [{"role": "user", "content": "Tides?"}]},
    Api.RESPONSES: {"input": "Tides?"},
    Api.MESSAGES: {"messages": [{"role": "user", "content": "Tides?"}], "max_tokens": 1024},
}
_RECIPES: dict[Api, type[Any]] = {
    Api.CHAT_COMPLETIONS: recipe.ChatCompletionRequest,
    Api.RESPONSES: recipe.ResponsesRequest,
    Api.MESSAGES: recipe.MessagesRequest,
}


def measure() -> list[Row]:
    """A B A B in this process."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        deepseek, template = Path(name) / "deepseek", Path(name) / "template"
        write_v4(deepseek)
        CHAT_MODELS["qwen3"].write(template)
        for folder in (deepseek, template):
            codec = load_codec(folder, MODEL, 64)
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            ids = tokenizer.encode(TEXT, add_special_tokens=False).ids[:TOKENS]
            for api in BODIES:
                baseline, what = (
                    (_recipe(folder, api, ids), "deepseek-recipe's events")
                    if folder is deepseek
                    else (_plain(tokenizer, ids), "DecodeStream, one JSON a token")
                )
                rows += _compare(api, folder.name, _converse(codec, api, ids), what, baseline)
    return rows


def _compare(api: Api, what: str, ours: Callable[[], None], base: str, theirs: Callable[[], None]) -> list[Row]:
    pairs = [(_cpu_us(theirs), _cpu_us(ours)) for _ in range(ROUNDS)]
    case = api.value.split()[0]
    return [
        Row(f"converse {what}", case, base, "CPU us/token", tuple(pair[0] for pair in pairs), is_baseline=True),
        Row(f"converse {what}", case, "Converse", "CPU us/token", tuple(pair[1] for pair in pairs)),
    ]


def _cpu_us(work: Callable[[], None]) -> float:
    began_s = time.process_time()
    work()
    return 1e6 * (time.process_time() - began_s) / (STREAMS * TOKENS)


def _converse(codec: Codec, api: Api, ids: Sequence[int]) -> Callable[[], None]:
    body = json.dumps({"model": MODEL, "stream": True, **BODIES[api]}).encode()
    converted = codec.converters[api].convert(body, RequestNames("request", 1_700_000_000))
    assert isinstance(converted, Converted)
    state = pack_state(msgspec.structs.replace(converted.shape, start=AnswerStart.REASONING))
    streams = range(1, STREAMS + 1)
    opens = [tpb.OpenStream(stream_id=n, output_state=state, prompt_tokens=9) for n in streams]
    numbers, counts = pack_u32(streams), pack_u32([1] * STREAMS)
    turns = [tpb.ConverseRequest(open=opens).SerializeToString()]
    turns += [
        tpb.ConverseRequest(stream_ids=numbers, counts=counts, token_ids=pack_u32([i] * STREAMS)).SerializeToString()
        for i in ids
    ]

    def work() -> None:
        answers = AnswerStreams(codec)
        for packed in turns:
            pieces = answers.turn(to_turn(tpb.ConverseRequest.FromString(packed)))
            for reply in build_replies(pieces):
                reply.SerializeToString()
                if reply.failed:
                    raise RuntimeError(reply.failed[0].failure.message)

    return work


def _recipe(folder: Path, api: Api, ids: Sequence[int]) -> Callable[[], None]:
    tokenizer = recipe.Tokenizer.from_file(str(folder / "tokenizer.json"))
    conversation = recipe.Conversation([recipe.UserMessage("")])
    request = recipe.ConversationRequest(conversation, recipe.ModelVersion.DeepseekV4Pro)
    options = recipe.ParsingOptions(
        parse_tool_calls=False, thinking_initial_stage=recipe.ThinkingInitialStage.ReasoningContinuation
    )

    def work() -> None:
        for _ in range(STREAMS):
            generator = _RECIPES[api].chunk_generator(request, "answer-1", MODEL)
            processor = recipe.StreamProcessor(generator, options, tokenizer)
            for token_id in ids:
                for chunk in processor.push(recipe.InferenceChunk.tokens([token_id])):
                    b"data: " + chunk.to_json().encode() + b"\n\n"

    return work


def _plain(tokenizer: Tokenizer, ids: Sequence[int]) -> Callable[[], None]:
    def work() -> None:
        for _ in range(STREAMS):
            decoding = DecodeStream(skip_special_tokens=True)
            for token_id in ids:
                text = decoding.step(tokenizer, token_id) or ""
                b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"

    return work
