"""The official client reads our Chat Completions, and what it holds can be sent again. Bytes only, no network."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer

from shoal_tokenizer.codec.api import (
    AnswerEnd,
    Api,
    CallArguments,
    CallBegin,
    CallEnd,
    Codec,
    Converted,
    Delta,
    Finish,
    Part,
    RequestNames,
    Sampling,
    Text,
    Usage,
)
from shoal_tokenizer.codec.conversation import Conversation
from shoal_tokenizer.codec.events.chat_completions import write_chat_completion
from shoal_tokenizer.codec.events.completions import write_completion
from shoal_tokenizer.codec.requests.chat_completions import ChatCompletionsConverter
from shoal_tokenizer.codec.requests.completions import CompletionsConverter
from shoal_tokenizer.codec.requests.served_model import ServedModel
from shoal_tokenizer.encode import Encoded, RequestEncoder
from shoal_tokenizer.format import AnswerStreams, Ending, Opening, Turn
from shoal_tokenizer.thread_pool import ThreadPool

from .sdk_climber import LOOP_CALLS, client_of, http_response, next_answer

SERVED = ServedModel("tiny", Sampling(), 100)
STEP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "step",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
            "additionalProperties": False,
        },
    },
}
PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch"}}
USAGE = Usage(9, 8, 7, 3)


class Climber:
    """Answers over HTTP as a model would that takes five steps; counts them in the conversation that it was sent."""

    def __init__(self) -> None:
        self.conversations: list[Conversation] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        names = RequestNames(f"r{len(self.conversations)}", 1_790_000_000)
        if request.url.path.endswith("/chat/completions"):
            converted = ChatCompletionsConverter(SERVED).convert(request.content, names)
            assert isinstance(converted.prompt, Conversation)
            self.conversations.append(converted.prompt)
            return self._send(converted, write_chat_completion(converted.shape), self._answer(converted.prompt))
        converted = CompletionsConverter(SERVED).convert(request.content, names)
        return self._send(converted, write_completion(converted.shape), [Text("upon "), Text("a time")])

    @staticmethod
    def _send(converted: Converted, writer: Any, parts: Sequence[Part]) -> httpx.Response:
        raw = writer.open(9, 8) + b"".join(writer.delta(Delta([part])) for part in parts)
        raw += writer.finish(AnswerEnd(Finish.STOP, USAGE))
        return http_response(converted.shape, raw)

    @staticmethod
    def _answer(conversation: Conversation) -> Sequence[Part]:
        if [tool["function"]["name"] for tool in conversation.tools or ()] == ["patch"]:
            return [CallBegin("patch"), CallArguments('{"input": "*** \\"'), CallArguments('\\n"}'), CallEnd()]
        return next_answer(conversation)


@pytest.fixture
def climber() -> Climber:
    return Climber()


@pytest.fixture
def client(climber: Climber) -> openai.OpenAI:
    return client_of(climber)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_loop_of_five_calls(client: openai.OpenAI, climber: Climber, is_stream: bool) -> None:
    history: list[Any] = [{"role": "user", "content": "Climb."}]
    asked: dict[str, Any] = {"model": "tiny", "messages": history, "tools": [STEP], "parallel_tool_calls": False}
    for _ in range(LOOP_CALLS + 1):
        if is_stream:
            with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
                completion: Any = stream.get_final_completion()
        else:
            completion = client.chat.completions.create(**asked)
        choice = completion.choices[0]
        assert completion.usage.completion_tokens_details.reasoning_tokens == 3
        assert completion.usage.prompt_tokens_details.cached_tokens == 8
        history.append(choice.message)  # as the client holds it
        calls = choice.message.tool_calls or []
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        history += [{"role": "tool", "tool_call_id": c.id, "content": c.function.arguments} for c in calls]
    assert choice.message.content == "I am at the top." and not calls
    answers = [message for message in climber.conversations[-1].messages if message["role"] == "assistant"]
    assert [message["tool_calls"][0]["function"]["arguments"] for message in answers] == [
        {"number": number} for number in range(1, LOOP_CALLS + 1)
    ]
    assert all(message["reasoning_content"] == "On." for message in answers)
    assert climber.conversations[-1].tool_choice.is_single


class Place(BaseModel):
    city: str


def test_structured_output_is_parsed_and_can_be_sent_back(client: openai.OpenAI, climber: Climber) -> None:
    asked: list[Any] = [{"role": "user", "content": "Where?"}]
    answer = client.chat.completions.parse(model="tiny", messages=asked, response_format=Place)
    message = answer.choices[0].message
    assert message.parsed == Place(city="Paris")
    client.chat.completions.create(model="tiny", messages=[*asked, message, *asked])  # type: ignore[list-item]
    assert climber.conversations[-1].messages[1]["content"] == '{"city": "Paris"}'


def test_a_custom_tool_is_called_with_its_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [PATCH]}
    (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or ()
    assert call.type == "custom" and (call.custom.name, call.custom.input) == ("patch", '*** "\n')
    chunks = client.chat.completions.create(**asked, stream=True)
    entries = [entry.to_dict() for chunk in chunks for c in chunk.choices for entry in c.delta.tool_calls or ()]
    assert "".join(entry["custom"]["input"] for entry in entries) == '*** "\n'  # type: ignore[index,misc]


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="Once ")
    chunks = client.completions.create(model="tiny", prompt="Once ", stream=True)
    assert whole.choices[0].text == "upon a time" == "".join(chunk.choices[0].text for chunk in chunks)
    assert whole.object == "text_completion" and whole.usage and whole.usage.total_tokens == 16


@pytest.mark.parametrize(
    ("api", "asked", "shown"),
    [
        (Api.CHAT_COMPLETIONS, {"messages": [{"role": "user", "content": "Say hello."}]}, "delta"),
        (Api.COMPLETIONS, {"prompt": "Say hello."}, "text"),
    ],
)
async def test_from_body_to_stream_through_the_real_codec(
    codec: Codec, reference: Tokenizer, api: Api, asked: dict[str, Any], shown: str
) -> None:
    body = json.dumps({"model": codec.model, "stream": True, "stream_options": {"include_usage": True}, **asked})
    pool = ThreadPool(1, 1)
    try:
        encoded = await RequestEncoder(codec, pool).encode(api, body.encode(), RequestNames("r1", 5))
    finally:
        pool.close()
    assert isinstance(encoded, Encoded)
    ids = reference.encode("the quick <think> 你好", add_special_tokens=False).ids
    streams = AnswerStreams(codec)
    raw = _events(streams, Turn(opens=[Opening(1, encoded.output_state, len(encoded.token_ids), 0)]))
    for token_id in ids:
        raw += _events(streams, Turn(stream_ids=[1], counts=[1], token_ids=[token_id]))
    (last,) = streams.turn(Turn(endings=[Ending(1, Finish.STOP)]))
    seen = [json.loads(part.removeprefix(b"data: ")) for part in (raw + last.events).split(b"\n\n")[:-2]]
    told = [choice[shown] for event in seen for choice in event["choices"]]
    text = "".join(piece if shown == "text" else piece.get("content", "") for piece in told)
    assert text == "the quick <think> 你好"
    assert seen[-1]["usage"]["completion_tokens"] == len(ids)
    assert seen[-1]["usage"]["prompt_tokens"] == len(encoded.token_ids)


def _events(streams: AnswerStreams, turn: Turn) -> bytes:
    return b"".join(piece.events for piece in streams.turn(turn))
