"""Answers the official client over bare bytes, as a model would that takes five steps."""

from collections.abc import Callable, Sequence

import httpx
import openai

from shoal_tokenizer.codec.api import AnswerShape, CallArguments, CallBegin, CallEnd, Part, Reasoning, Text
from shoal_tokenizer.codec.conversation import Conversation

LOOP_CALLS = 5


def next_answer(conversation: Conversation) -> Sequence[Part]:
    """Counts the steps in the conversation that it was sent."""
    if conversation.answer_format is not None:
        return [Reasoning("A city."), Text('{"city": "Paris"}')]
    taken = sum(message["role"] == "tool" for message in conversation.messages)
    if taken == LOOP_CALLS:
        return [Reasoning("Done."), Text("I am at "), Text("the top.")]
    return [Reasoning("On."), CallBegin("step"), CallArguments(f'{{"number": {taken + 1}}}'), CallEnd()]


def http_response(shape: AnswerShape, raw: bytes) -> httpx.Response:
    kind = "text/event-stream" if shape.is_stream else "application/json"
    return httpx.Response(200, content=raw, headers={"content-type": kind})


def client_of(answer: Callable[[httpx.Request], httpx.Response]) -> openai.OpenAI:
    http = httpx.Client(transport=httpx.MockTransport(answer))
    return openai.OpenAI(api_key="none", base_url="http://shoal/v1", max_retries=0, http_client=http)
