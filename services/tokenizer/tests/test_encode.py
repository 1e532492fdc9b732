import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from shoal_contracts.errors import BadRequest
from shoal_contracts.v1 import common_pb2 as pb
from shoal_tokenizer.codec.api import Api, Codec, Finish, Rendered, RequestNames, Sampling
from shoal_tokenizer.encode import Encoded, RequestEncoder, dictate
from shoal_tokenizer.format import AnswerStreams, Ending, Opening, Turn, format_answer
from shoal_tokenizer.thread_pool import ThreadPool

NAMES = RequestNames("r1", 1700000000)


@pytest.fixture
def encoder(codec: Codec) -> Iterator[RequestEncoder]:
    pool = ThreadPool(1, 4)
    yield RequestEncoder(codec, pool)
    pool.close()


def body(text: str, **fields: object) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}]} | fields).encode()


async def test_a_request_becomes_the_templates_prompt(encoder: RequestEncoder, reference: Tokenizer) -> None:
    encoded = await encoder.encode(Api.CHAT_COMPLETIONS, body("fox", stream=True), NAMES)
    prompt = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n"
    assert encoded.token_ids == reference.encode(prompt).ids
    assert (encoded.model, encoded.is_stream, encoded.is_agent) == ("tiny", True, False)
    assert encoded.sampling.stop_token_ids == [0, 2]


async def test_equal_requests_give_equal_replies(encoder: RequestEncoder) -> None:
    first, second = [await encoder.encode(Api.CHAT_COMPLETIONS, body("fox"), NAMES) for _ in range(2)]
    assert first == second


async def test_the_output_state_has_no_prompt_text_and_formats(encoder: RequestEncoder, codec: Codec) -> None:
    encoded = await encoder.encode(Api.CHAT_COMPLETIONS, body("SECRET"), NAMES)
    assert b"SECRET" not in encoded.output_state
    formatted = format_answer(codec, Opening(0, encoded.output_state, 5, 0, [65]), (), Ending(0, Finish.STOP))
    assert json.loads(formatted.body)["id"] == "chatcmpl-r1"


async def test_a_text_without_a_conversation_is_the_whole_prompt(codec: Codec, reference: Tokenizer) -> None:
    pool = ThreadPool(1, 4)
    try:
        raw = json.dumps({"model": "tiny", "prompt": "the quick <|im_end|>"}).encode()
        encoded = await RequestEncoder(codec, pool).encode(Api.COMPLETIONS, raw, NAMES)
    finally:
        pool.close()
    assert isinstance(encoded, Encoded)
    assert reference.decode(encoded.token_ids) == "the quick <|im_end|>" and 2 not in encoded.token_ids


async def test_further_answers_have_a_seed_and_a_number_of_their_own(encoder: RequestEncoder, codec: Codec) -> None:
    encoded = await encoder.encode(Api.CHAT_COMPLETIONS, body("fox", n=3, seed=2**63 - 2), NAMES)
    assert isinstance(encoded, Encoded)
    assert encoded.sampling.seed == 2**63 - 2
    assert [sampling.seed for sampling, _ in encoded.other_choices] == [2**63 - 1, 0]
    assert [replace(sampling, seed=None) for sampling, _ in encoded.other_choices] == [
        replace(encoded.sampling, seed=None)
    ] * 2
    ids = codec.encoder.encode([("wave", False)])
    kept = []
    for _, state in encoded.other_choices:
        streams = AnswerStreams(codec)
        turn = Turn([Opening(1, state, 9, 0)], [1], [len(ids)], ids, endings=[Ending(1, Finish.STOP)])
        (piece,) = streams.turn(turn)
        assert piece.events == b"" and piece.kept_body
        kept.append(piece.kept_body)
    opening = Opening(1, encoded.output_state, 9, 0)
    endings = [Ending(1, Finish.STOP, other_choices=kept)]
    (piece,) = AnswerStreams(codec).turn(Turn([opening], [1], [len(ids)], ids, endings=endings))
    shown = json.loads(piece.events)
    assert [(choice["index"], choice["message"]["content"]) for choice in shown["choices"]] == [
        (number, "wave") for number in range(3)
    ]
    assert shown["usage"]["completion_tokens"] == 3 * len(ids) and shown["usage"]["prompt_tokens"] == 9


async def test_an_api_that_is_not_offered_is_named(codec: Codec) -> None:
    pool = ThreadPool(1, 4)
    try:
        with pytest.raises(BadRequest) as caught:
            await RequestEncoder(replace(codec, converters={}), pool).encode(Api.MESSAGES, b"{}", NAMES)
    finally:
        pool.close()
    assert caught.value.code == pb.UNSUPPORTED and "Messages" in caught.value.message


def test_sampling_that_the_models_mode_dictates_is_told_where_it_differs() -> None:
    rendered = Rendered([], fixed={"temperature": 1.0, "seed": 7}, least={"top_p": 0.95, "min_p": 0.1})
    asked = Sampling(temperature=0.5, top_p=0.5, min_p=0.2, max_tokens=5)
    sampling, notes = dictate(asked, rendered)
    assert sampling == Sampling(temperature=1.0, top_p=0.95, min_p=0.2, seed=7, max_tokens=5)
    assert notes == (
        "temperature: 0.5 was asked for, this model in this mode takes 1.0",
        "top_p: 0.5 was asked for, this model in this mode takes 0.95",
    )
    assert dictate(Sampling(temperature=1.0), rendered)[1] == ()
    assert dictate(Sampling(), rendered)[0].top_p is None


async def test_schemas_of_every_depth_are_taken_or_refused(encoder: RequestEncoder) -> None:
    outcomes = set()
    for depth in (1, *range(940, 1000, 4), *range(980, 996), 5000):
        schema = '{"properties":{"a":' * depth + "{}" + "}}" * depth
        asked = body("fox", response_format={"type": "json_schema", "json_schema": {"name": "deep", "schema": 0}})
        try:
            await encoder.encode(
                Api.CHAT_COMPLETIONS, asked.replace(b'"schema": 0', f'"schema": {schema}'.encode()), NAMES
            )
            outcomes.add("taken")
        except BadRequest as error:
            assert "deep" in error.message
            outcomes.add("refused")
    assert outcomes == {"taken", "refused"}
