"""The official client reads our answers, and what it holds can be sent again. Bytes only, no network."""

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer

from shoal_testkit.grammars.responses import check_responses_stream
from shoal_tokenizer.codec.api import (
    AnswerEnd,
    Api,
    Codec,
    Converted,
    Delta,
    Finish,
    RequestNames,
    Sampling,
    Usage,
)
from shoal_tokenizer.codec.conversation import Conversation
from shoal_tokenizer.codec.events.responses import write_response
from shoal_tokenizer.codec.requests.responses import ResponsesConverter
from shoal_tokenizer.codec.requests.served_model import ServedModel
from shoal_tokenizer.encode import Encoded, RequestEncoder
from shoal_tokenizer.format import AnswerStreams, Ending, Opening, Turn
from shoal_tokenizer.thread_pool import ThreadPool

from .sdk_climber import LOOP_CALLS, client_of, http_response, next_answer

CONVERTER = ResponsesConverter(ServedModel("tiny", Sampling(), 100))
STEP: dict[str, Any] = {
    "type": "function",
    "name": "step",
    "strict": False,
    "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
}


class Climber:
    """Answers over HTTP as a model would that takes five steps; counts them in the conversation that it was sent."""

    def __init__(self) -> None:
        self.conversations: list[Conversation] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        names = RequestNames(f"r{len(self.conversations)}", 1_790_000_000)
        converted = CONVERTER.convert(request.content, names)
        assert isinstance(converted, Converted) and isinstance(converted.prompt, Conversation)
        self.conversations.append(converted.prompt)
        writer = write_response(converted.shape)
        raw = writer.open(9, 0) + writer.delta(Delta(list(next_answer(converted.prompt))))
        raw += writer.finish(AnswerEnd(Finish.STOP, Usage(9, 8, 7, 3)))
        if converted.shape.is_stream:
            check_responses_stream(raw)
        return http_response(converted.shape, raw)


@pytest.fixture
def climber() -> Climber:
    return Climber()


@pytest.fixture
def client(climber: Climber) -> openai.OpenAI:
    return client_of(climber)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_loop_of_five_calls(client: openai.OpenAI, climber: Climber, is_stream: bool) -> None:
    history: list[Any] = [{"role": "user", "content": "Climb."}]
    asked: dict[str, Any] = {
        "model": "tiny",
        "tools": [STEP],
        "include": ["reasoning.encrypted_content"],
        "store": False,
    }
    for _ in range(LOOP_CALLS + 1):
        if is_stream:
            with client.responses.stream(input=history, **asked) as stream:
                answer: Any = stream.get_final_response()
        else:
            answer = client.responses.create(input=history, **asked)
        history += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        history += [{"type": "function_call_output", "call_id": c.call_id, "output": c.arguments} for c in calls]
    assert answer.output_text == "I am at the top." and not calls
    answers = [message for message in climber.conversations[-1].messages if message["role"] == "assistant"]
    assert [message["tool_calls"][0]["function"]["arguments"] for message in answers] == [
        {"number": number} for number in range(1, LOOP_CALLS + 1)
    ]
    assert all(message["reasoning_content"] == "On." for message in answers)


class Place(BaseModel):
    city: str


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    assert client.responses.parse(model="tiny", input="Where?", text_format=Place).output_parsed == Place(city="Paris")


async def test_from_body_to_stream_through_the_real_codec(codec: Codec, reference: Tokenizer) -> None:
    body = json.dumps({"model": codec.model, "input": "Say hello.", "stream": True}).encode()
    pool = ThreadPool(1, 1)
    try:
        encoded = await RequestEncoder(codec, pool).encode(Api.RESPONSES, body, RequestNames("r1", 5))
    finally:
        pool.close()
    assert isinstance(encoded, Encoded)
    ids = reference.encode("the quick brown fox 你好", add_special_tokens=False).ids
    streams = AnswerStreams(codec)
    raw = _events(streams, Turn(opens=[Opening(1, encoded.output_state, len(encoded.token_ids), 0)]))
    for token_id in ids:
        raw += _events(streams, Turn(stream_ids=[1], counts=[1], token_ids=[token_id]))
    (last,) = streams.turn(Turn(endings=[Ending(1, Finish.STOP)]))
    final = check_responses_stream(raw + last.events)
    assert final["output"][0]["content"][0]["text"] == "the quick brown fox 你好"
    assert final["usage"]["output_tokens"] == len(ids) and final["usage"]["input_tokens"] == len(encoded.token_ids)
    assert last.kept_body is not None and json.loads(last.kept_body) == final


def _events(streams: AnswerStreams, turn: Turn) -> bytes:
    return b"".join(piece.events for piece in streams.turn(turn))
