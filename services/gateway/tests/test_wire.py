"""Messages to values and back, and the columns that tokens and events travel in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_contracts.errors import Unavailable
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import decode_pb2, prefill_pb2, tokenizer_pb2
from shoal_gateway.links import wire
from shoal_gateway.links.tokenizer import _build, _Tokens
from shoal_gateway.ports import Ending, EndReason
from shoal_gateway.request import (
    Api,
    BodyToEncode,
    HistoryNeeded,
    Opening,
    Placement,
    PrefillWork,
    Prompt,
    Storage,
    TokenBatch,
)
from shoal_kvblocks import Item
from shoal_policy import TrafficClass
from shoal_runtime.tracing import TRACEPARENT, extract, start_span

SAMPLING = pb.Sampling(
    max_tokens=7, temperature=0.5, logit_bias={3: 1.5}, stop_token_ids=[1, 2], constraint='{"type": "structural_tag"}'
)
PROMPT = Prompt(
    model="m",
    token_ids=pack_u32([1, 2, 3]),
    sampling=SAMPLING.SerializeToString(),
    output_state=b"state",
    is_streaming=True,
    traffic_class=TrafficClass.AGENT,
    max_tokens=7,
    items=(Item(1, 2, "image"),),
    notes=("effort: not known",),
    is_constrained=True,
    storage=Storage("resp_1", b"[]", True, "resp_0", b'{"status":"queued","id":"resp_1"}', b'{"id":"resp_1"}'),
)


def test_encoded_prompt_keeps_everything() -> None:
    reply = tokenizer_pb2.EncodeReply(
        model="m",
        token_ids=PROMPT.token_ids,
        items=[pb.Item(offset_tokens=1, length_tokens=2, identifier="image")],
        sampling=SAMPLING,
        stream=True,
        traffic_class=pb.AGENT,
        output_state=b"state",
        notes=["effort: not known"],
        storage=tokenizer_pb2.Storage(
            input_items=b"[]",
            is_stored=True,
            is_background=True,
            previous_response_id="resp_0",
            pending_body=b'{"status":"queued","id":"resp_1"}',
            lost_body=b'{"id":"resp_1"}',
        ),
    )
    assert wire.to_encoded(reply) == PROMPT
    reply.storage.is_stored = False
    assert wire.to_prompt(reply).storage is None


def test_history_that_is_needed_is_no_prompt() -> None:
    assert wire.to_encoded(tokenizer_pb2.EncodeReply(needed_response_id="resp_0")) == HistoryNeeded("resp_0")


@pytest.mark.parametrize("api", list(Api))
def test_body_goes_to_the_tokenizer_as_it_came(api: Api) -> None:
    request = wire.to_encode_request(BodyToEncode(api, b"{", "r1"), created_s=7)
    assert (tokenizer_pb2.Api.Name(request.api), request.body, request.request_id, request.created_s) == (
        *(api.name, b"{"),
        *("r1", 7),
    )
    assert not request.HasField("history")
    assert wire.to_encode_request(BodyToEncode(api, b"{", "r1", b""), created_s=7).HasField("history")


def test_absent_max_tokens_is_unknown_and_unknown_class_is_chat() -> None:
    prompt = wire.to_prompt(tokenizer_pb2.EncodeReply(model="m"))
    assert prompt.max_tokens is None
    assert not prompt.is_constrained
    assert prompt.traffic_class is TrafficClass.CHAT


def test_placement_carries_sampling_as_the_tokenizer_wrote_it() -> None:
    request = wire.to_generate_request(Placement("r", "pool", "salt", PROMPT, pack_u32([9]), True, 1.5))
    assert request.sampling == SAMPLING
    assert request.items[0].identifier == "image"
    assert (request.pool, request.cache_salt, request.is_local_prefill, request.budget_ms) == (
        "pool",
        "salt",
        True,
        1500,
    )
    assert request.resumed_token_ids == pack_u32([9])
    assert not request.HasField("traceparent")


def test_placement_carries_the_trace_it_was_made_under() -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    with start_span("request", extract({TRACEPARENT: f"00-{trace}-b7ad6b7169203331-01"})):
        request = wire.to_generate_request(Placement("r", "pool", "", PROMPT, b"", False, 1.5))
    assert request.traceparent.split("-")[1] == trace


@pytest.mark.parametrize("expected", [None, 0, 128])
def test_prefill_job_says_unknown_by_absence(expected: int | None) -> None:
    work = PrefillWork("r", 1, "pool", "all", "", PROMPT, expected, TrafficClass.PROBE, 2.0, ("node-a",))
    job = wire.to_prefill_job(work, "answers.here")
    assert job.dram_store_ids == ["node-a"]
    assert job.HasField("expected_hit_tokens") == (expected is not None)
    assert job.expected_hit_tokens == (expected or 0)
    assert job.traffic_class == pb.PROBE
    assert job.answer_subject == "answers.here"
    assert job.sampling.temperature == 0.5
    assert not job.sampling.HasField("constraint")


def test_prefill_answer() -> None:
    answer = prefill_pb2.PrefillAnswer(request_id="r", instance_id="w", delivery=2)
    answer.done.CopyFrom(
        prefill_pb2.PrefillDone(
            hit_tokens=1, miss_tokens=2, stored=prefill_pb2.STORED_UNKNOWN, prefetched_blocks=3, prefetch_ms=4
        )
    )
    done = wire.to_prefill_done(answer)
    assert (done.prefetched_blocks, done.prefetch_ms) == (3, 4)
    assert (done.instance_id, done.delivery, done.hit_tokens, done.miss_tokens, done.stored) == (
        "w",
        2,
        1,
        2,
        "unknown",
    )


def test_opening_and_ending() -> None:
    opened = wire.to_open_stream(4, Opening("m", b"state", 3, 2, pack_u32([5]), is_resumed=True, prior_events=8))
    assert (opened.stream_id, opened.prior_token_ids, opened.is_resumed) == (4, pack_u32([5]), True)
    assert opened.prior_events == 8
    plain = wire.to_finish_stream(4, Ending(EndReason.STOP))
    assert not plain.HasField("failure") and not plain.HasField("receipt_json") and not plain.HasField("hit_tokens")
    failed = wire.to_finish_stream(4, Ending(EndReason.FAILURE, Unavailable(pb.PEER_SILENT, "silent"), b"{}", 0))
    assert failed.failure.code == pb.PEER_SILENT
    assert failed.HasField("hit_tokens")


def test_finished_with_and_without_a_failure() -> None:
    assert wire.to_error(decode_pb2.Finished(reason=pb.STOP)) is None
    finished = decode_pb2.Finished(reason=pb.FAILURE, failure=pb.Failure(code=pb.ENGINE_FAILED, message="m"))
    error = wire.to_error(finished)
    assert error is not None and error.code == pb.ENGINE_FAILED


STREAMS = st.dictionaries(st.integers(1, 2**32 - 1), st.lists(st.integers(0, 2**32 - 1), max_size=4), max_size=6)


@given(STREAMS)
def test_token_columns_are_split_as_they_were_built(streams: dict[int, list[int]]) -> None:
    [request] = _build([_Tokens(stream_id, TokenBatch(pack_u32(ids))) for stream_id, ids in streams.items()])
    split = list(wire.split_tokens(request.stream_ids, request.counts, request.token_ids))
    assert split == [(stream_id, pack_u32(ids)) for stream_id, ids in streams.items()]


def test_one_message_has_opens_tokens_ends_and_drops() -> None:
    items = [
        tokenizer_pb2.OpenStream(stream_id=1),
        _Tokens(1, TokenBatch(pack_u32([5]), (pb.TokenLogprobs(logprob=-1).SerializeToString(),))),
        _Tokens(1, TokenBatch(pack_u32([6]), (pb.TokenLogprobs(logprob=-2).SerializeToString(),))),
        tokenizer_pb2.FinishStream(stream_id=1, reason=pb.STOP),
        9,
    ]
    [request] = _build(items)
    assert list(wire.split_tokens(request.stream_ids, request.counts, request.token_ids)) == [(1, pack_u32([5, 6]))]
    assert [entry.logprob for entry in request.logprobs[0].tokens] == [-1, -2]
    assert (len(request.open), len(request.finish), request.drop) == (1, 1, pack_u32([9]))


@pytest.mark.parametrize("parsed", [(), (3, 4)])
@pytest.mark.parametrize("counts", [(), (5, 6)])
def test_event_columns(parsed: tuple[int, ...], counts: tuple[int, ...]) -> None:
    reply = tokenizer_pb2.ConverseReply(
        stream_ids=pack_u32([1, 2]),
        lengths=pack_u32([2, 3]),
        events=b"aabbb",
        parsed_tokens=pack_u32(parsed),
        event_counts=pack_u32(counts),
    )
    (first, second), (few, more) = parsed or (None, None), counts or (0, 0)
    assert list(wire.split_events(reply)) == [(1, b"aa", first, few), (2, b"bbb", second, more)]


def test_columns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError):
        list(wire.split_tokens(pack_u32([1]), pack_u32([2]), pack_u32([7])))
    with pytest.raises(ValueError):
        list(wire.split_events(tokenizer_pb2.ConverseReply(stream_ids=pack_u32([1]), lengths=pack_u32([2]))))
