import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from shoal_contracts.errors import BadRequest, Bug
from shoal_contracts.ids import pack_u32, unpack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import tokenizer_pb2 as tpb
from shoal_testkit.clock import VirtualClock
from shoal_tokenizer import metrics
from shoal_tokenizer.codec.api import (
    AnswerShape,
    Api,
    Codec,
    Converted,
    Finish,
    NeedsHistory,
    RequestConverter,
    RequestNames,
    Sampling,
    ShownFailure,
    Storage,
    TokenLogprob,
)
from shoal_tokenizer.encode import RequestEncoder, pack_state
from shoal_tokenizer.format import Ending, Piece
from shoal_tokenizer.grpc_api import TokenizerApi, build_replies, to_logprobs, to_sampling, to_turn
from shoal_tokenizer.thread_pool import ThreadPool


def test_absent_sampling_fields_stay_absent() -> None:
    message = to_sampling(Sampling())
    assert message == pb.Sampling()
    assert not message.HasField("temperature") and not message.HasField("logprobs")


def test_sampling_keeps_zeros() -> None:
    message = to_sampling(Sampling(temperature=0, logprobs=0, seed=2**63 - 1, logit_bias={7: -1.0}, stop_token_ids=[2]))
    assert message.HasField("temperature") and message.HasField("logprobs")
    assert message.seed == 2**63 - 1 and dict(message.logit_bias) == {7: -1.0} and list(message.stop_token_ids) == [2]


def test_a_turn_survives_the_wire() -> None:
    failure = pb.Failure(code=pb.CONTEXT_LENGTH_EXCEEDED, message="m", param="p")
    request = tpb.ConverseRequest(
        open=[
            tpb.OpenStream(
                stream_id=1,
                output_state=b"s",
                prompt_tokens=9,
                hit_tokens=4,
                prior_token_ids=pack_u32([5, 6]),
                is_resumed=True,
                prior_events=8,
            )
        ],
        stream_ids=pack_u32([1, 2]),
        counts=pack_u32([2, 1]),
        token_ids=pack_u32([7, 8, 9]),
        logprobs=[
            pb.StreamLogprobs(
                stream_id=1,
                tokens=[pb.TokenLogprobs(logprob=-0.5, top_token_ids=pack_u32([7]), top_logprobs=[-0.5])],
            )
        ],
        finish=[
            tpb.FinishStream(stream_id=1, reason=pb.STOP, receipt_json=b"{}", hit_tokens=0),
            tpb.FinishStream(
                stream_id=2,
                reason=pb.FAILURE,
                failure=failure,
            ),
        ],
        drop=pack_u32([3]),
    )
    turn = to_turn(tpb.ConverseRequest.FromString(request.SerializeToString()))
    assert [
        (o.stream_id, o.output_state, o.prompt_tokens, o.hit_tokens, list(o.prior_ids), o.is_resumed, o.prior_events)
        for o in turn.opens
    ] == [(1, b"s", 9, 4, [5, 6], True, 8)]
    assert [list(column) for column in (turn.stream_ids, turn.counts, turn.token_ids, turn.drops)] == [
        [1, 2],
        [2, 1],
        [7, 8, 9],
        [3],
    ]
    (told,) = turn.logprobs[1]
    assert (told.logprob, list(told.top_ids), list(told.top_logprobs)) == (-0.5, [7], [-0.5])
    assert turn.endings == [
        Ending(1, Finish.STOP, None, b"{}", 0),
        Ending(2, Finish.FAILURE, ShownFailure("context_length_exceeded", "m", True, "p"), None, None),
    ]


@pytest.mark.parametrize(
    "request_",
    [tpb.ConverseRequest(token_ids=b"abc"), tpb.ConverseRequest(finish=[tpb.FinishStream(stream_id=1)])],
    ids=["column", "reason"],
)
def test_a_broken_message_is_refused(request_: tpb.ConverseRequest) -> None:
    with pytest.raises(BadRequest):
        to_turn(request_)


def test_a_failure_code_of_a_later_version_reads_as_a_bug() -> None:
    finish = tpb.FinishStream(stream_id=1, reason=pb.FAILURE, failure=pb.Failure(code=999, message="m"))  # type: ignore[arg-type]
    failure = to_turn(tpb.ConverseRequest(finish=[finish])).endings[0].failure
    assert failure == ShownFailure("bug", "m", False)


def test_pieces_become_columns_and_lists() -> None:
    (reply,) = build_replies(
        [
            Piece(1, b"one", 3, stop_string="x"),
            Piece(2, completion_tokens=5, finish=Finish.CANCEL),
            Piece(3, error=Bug(pb.BUG, "m")),
            Piece(4, b"four", 6, completion_tokens=6, finish=Finish.STOP),
        ]
    )
    assert (list(unpack_u32(reply.stream_ids)), list(unpack_u32(reply.lengths))) == ([1, 4], [3, 4])
    assert list(unpack_u32(reply.parsed_tokens)) == [3, 6]
    assert reply.events == b"onefour"
    assert [(s.stream_id, s.stop_string) for s in reply.stopped] == [(1, "x")]
    assert [(c.stream_id, c.completion_tokens) for c in reply.closed] == [(2, 5), (4, 6)]
    assert [(f.stream_id, f.failure.code) for f in reply.failed] == [(3, pb.BUG)]


def test_logprobs_are_read() -> None:
    (token,) = to_logprobs([pb.TokenLogprobs(logprob=-1)])
    assert token.logprob == -1 and list(token.top_ids) == []
    assert isinstance(token, TokenLogprob)


@pytest.fixture
def api(codec: Codec):
    pool = ThreadPool(1, 1)
    yield TokenizerApi(codec, RequestEncoder(codec, pool), VirtualClock())
    pool.close()


def encode_request(**fields: object) -> tpb.EncodeRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "fox"}]} | fields
    return tpb.EncodeRequest(api=tpb.CHAT_COMPLETIONS, body=json.dumps(body).encode(), request_id="r", created_s=1)


async def test_encode_count_and_format_agree(api: TokenizerApi) -> None:
    encoded = await api.Encode(encode_request(), None)
    counted = await api.Count(encode_request(), None)
    assert counted.prompt_tokens == len(encoded.token_ids) // 4 > 0
    assert encoded.traffic_class == pb.CHAT and not encoded.items and not encoded.HasField("cache_key")
    reply = await api.Format(
        tpb.FormatRequest(output_state=encoded.output_state, token_ids=pack_u32([70, 71]), reason=pb.LENGTH), None
    )
    assert reply.completion_tokens == 2 and not reply.stopped_early
    assert json.loads(reply.body)["choices"][0]["finish_reason"] == "length"


async def test_outcomes_are_counted(api: TokenizerApi) -> None:
    def count(outcome: str) -> float:
        return metrics.CATALOGUE.value("requests_total", outcome=outcome)

    before = (count("OK"), count("MODEL_NOT_FOUND"))
    await api.Encode(encode_request(), None)
    with pytest.raises(BadRequest):
        await api.Encode(encode_request(model="other"), None)
    assert (count("OK"), count("MODEL_NOT_FOUND")) == (before[0] + 1, before[1] + 1)


async def test_an_api_must_be_named(api: TokenizerApi) -> None:
    with pytest.raises(BadRequest):
        await api.Encode(tpb.EncodeRequest(body=b"{}"), None)


async def test_a_state_of_another_version_cannot_be_formatted(
    api: TokenizerApi, a_shape: Callable[..., AnswerShape]
) -> None:
    state = b"\x63" + pack_state(a_shape())[1:]
    with pytest.raises(BadRequest):
        await api.Format(tpb.FormatRequest(output_state=state, reason=pb.STOP), None)


async def test_draining_without_open_answers_returns(api: TokenizerApi) -> None:
    await api.drain()
    with pytest.raises(Exception, match="leaving"):
        await api.Encode(encode_request(), None)


class GoesOn:
    """A converter whose body goes on with a stored response."""

    def __init__(self, converter: RequestConverter) -> None:
        self._converter = converter

    def convert(self, body: bytes, names: RequestNames) -> Converted | NeedsHistory:
        if names.history is None:
            return NeedsHistory("resp_1")
        converted = self._converter.convert(body, names)
        assert isinstance(converted, Converted)
        storage = Storage(names.history, True, False, "resp_1", b"pending", b"lost")
        return replace(converted, storage=storage, notes=("changed",), cache_key="key")


async def test_a_stored_response_is_asked_for_and_then_gone_on_with(codec: Codec) -> None:
    converters = {Api.CHAT_COMPLETIONS: GoesOn(codec.converters[Api.CHAT_COMPLETIONS])}
    api = TokenizerApi(
        codec, RequestEncoder(replace(codec, converters=converters), pool := ThreadPool(1, 1)), VirtualClock()
    )
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}]}).encode()
    request = tpb.EncodeRequest(api=tpb.CHAT_COMPLETIONS, body=body, request_id="1")
    try:
        assert await api.Encode(request, None) == tpb.EncodeReply(needed_response_id="resp_1")
        with pytest.raises(BadRequest, match="whole conversations"):
            await api.Count(request, None)
        request.history = b"[]"
        reply = await api.Encode(request, None)
        assert (list(reply.notes), reply.cache_key) == (["changed"], "key")
        stored = tpb.Storage(
            input_items=b"[]",
            is_stored=True,
            previous_response_id="resp_1",
            pending_body=b"pending",
            lost_body=b"lost",
        )
        assert reply.storage == stored
    finally:
        pool.close()


def test_events_are_counted_and_the_kept_body_comes_with_the_close() -> None:
    pieces = [Piece(1, b"ab", parsed_tokens=3, event_count=2), Piece(2, completion_tokens=4, kept_body=b"{}")]
    (reply,) = build_replies(pieces)
    assert list(unpack_u32(reply.event_counts)) == [2]
    assert reply.closed[0].kept_body == b"{}"
