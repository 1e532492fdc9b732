"""Between wire messages and the values of ``request`` and ``ports``; and the columns of decision 13.

docs/decisions/0013-tokens-travel-in-batches.md
"""

from collections.abc import Iterator

import msgspec

from shoal_contracts.errors import ShoalError, from_failure, to_failure
from shoal_contracts.ids import unpack_u32
from shoal_contracts.v1 import common_pb2, decode_pb2, prefill_pb2, tokenizer_pb2
from shoal_gateway.ports import Ending, EndReason
from shoal_gateway.request import (
    TOKEN_BYTES,
    Api,
    BodyToEncode,
    Choice,
    HistoryNeeded,
    Opening,
    Placement,
    PrefillDone,
    PrefillWork,
    Prompt,
    Storage,
)
from shoal_kvblocks import Item
from shoal_policy import TrafficClass
from shoal_runtime.tracing import traceparent

TRAFFIC_CLASSES = {
    common_pb2.CHAT: TrafficClass.CHAT,
    common_pb2.AGENT: TrafficClass.AGENT,
    common_pb2.PROBE: TrafficClass.PROBE,
}
WIRE_TRAFFIC_CLASSES = {value: key for key, value in TRAFFIC_CLASSES.items()}
END_REASONS = {
    common_pb2.STOP: EndReason.STOP,
    common_pb2.LENGTH: EndReason.LENGTH,
    common_pb2.CANCEL: EndReason.CANCEL,
    common_pb2.FAILURE: EndReason.FAILURE,
}
WIRE_END_REASONS = {value: key for key, value in END_REASONS.items()}
STORED = {
    prefill_pb2.STORED_YES: "yes",
    prefill_pb2.STORED_NONE: "none",
}
WIRE_APIS = {
    Api.CHAT_COMPLETIONS: tokenizer_pb2.CHAT_COMPLETIONS,
    Api.COMPLETIONS: tokenizer_pb2.COMPLETIONS,
    Api.RESPONSES: tokenizer_pb2.RESPONSES,
    Api.MESSAGES: tokenizer_pb2.MESSAGES,
}


class _Named(msgspec.Struct):
    """What the gateway reads of a response object."""

    id: str


_read_name = msgspec.json.Decoder(_Named).decode


def to_encode_request(work: BodyToEncode, created_s: int) -> tokenizer_pb2.EncodeRequest:
    return tokenizer_pb2.EncodeRequest(
        api=WIRE_APIS[work.api],
        body=work.body,
        request_id=work.request_id,
        created_s=created_s,
        history=work.history,
    )


def to_encoded(reply: tokenizer_pb2.EncodeReply) -> Prompt | HistoryNeeded:
    return HistoryNeeded(reply.needed_response_id) if reply.HasField("needed_response_id") else to_prompt(reply)


def to_prompt(reply: tokenizer_pb2.EncodeReply) -> Prompt:
    sampling = reply.sampling
    return Prompt(
        model=reply.model,
        token_ids=reply.token_ids,
        sampling=sampling.SerializeToString(),
        output_state=reply.output_state,
        is_streaming=reply.stream,
        traffic_class=TRAFFIC_CLASSES.get(reply.traffic_class, TrafficClass.CHAT),
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        items=tuple(Item(item.offset_tokens, item.length_tokens, item.identifier) for item in reply.items),
        notes=tuple(reply.notes),
        is_constrained=sampling.HasField("constraint"),
        storage=to_storage(reply.storage) if reply.HasField("storage") and reply.storage.is_stored else None,
        other_choices=tuple(
            Choice(choice.sampling.SerializeToString(), choice.output_state) for choice in reply.other_choices
        ),
    )


def to_storage(storage: tokenizer_pb2.Storage) -> Storage:
    """ValueError when the tokenizer's response object has no id."""
    return Storage(
        response_id=_read_name(storage.pending_body).id,
        input_items=storage.input_items,
        is_background=storage.is_background,
        previous_response_id=storage.previous_response_id if storage.HasField("previous_response_id") else None,
        pending_body=storage.pending_body,
        lost_body=storage.lost_body,
    )


def to_wire_items(prompt: Prompt) -> list[common_pb2.Item]:
    return [
        common_pb2.Item(offset_tokens=item.offset_tokens, length_tokens=item.length_tokens, identifier=item.identifier)
        for item in prompt.items
    ]


def to_generate_request(placement: Placement) -> decode_pb2.GenerateRequest:
    return decode_pb2.GenerateRequest(
        request_id=placement.request_id,
        pool=placement.pool,
        cache_salt=placement.cache_salt,
        token_ids=placement.prompt.token_ids,
        resumed_token_ids=placement.resumed_token_ids,
        items=to_wire_items(placement.prompt),
        sampling=common_pb2.Sampling.FromString(placement.prompt.sampling),
        is_local_prefill=placement.is_local_prefill,
        budget_ms=round(placement.budget_s * 1000),
        traceparent=traceparent(),
    )


def to_prefill_job(work: PrefillWork, answer_subject: str) -> prefill_pb2.PrefillJob:
    sampling = common_pb2.Sampling.FromString(work.prompt.sampling)
    sampling.ClearField("constraint")  # it is about the answer, of which prefill makes none
    return prefill_pb2.PrefillJob(
        request_id=work.request_id,
        pool=work.pool,
        tier=work.tier,
        answer_subject=answer_subject,
        cache_salt=work.cache_salt,
        token_ids=work.prompt.token_ids,
        items=to_wire_items(work.prompt),
        sampling=sampling,
        budget_ms=round(work.budget_s * 1000),
        traffic_class=WIRE_TRAFFIC_CLASSES[work.traffic_class],
        expected_hit_tokens=work.expected_hit_tokens,
        dram_store_ids=work.dram_store_ids,
    )


def to_prefill_done(answer: prefill_pb2.PrefillAnswer) -> PrefillDone:
    done = answer.done
    return PrefillDone(
        instance_id=answer.instance_id,
        delivery=answer.delivery,
        hit_tokens=done.hit_tokens,
        miss_tokens=done.miss_tokens,
        stored=STORED.get(done.stored, "unknown"),
        compute_ms=done.compute_ms,
        store_wait_ms=done.store_wait_ms,
        prefetched_blocks=done.prefetched_blocks,
        prefetch_ms=done.prefetch_ms,
    )


def to_open_stream(stream_id: int, opening: Opening) -> tokenizer_pb2.OpenStream:
    return tokenizer_pb2.OpenStream(
        stream_id=stream_id,
        output_state=opening.output_state,
        prompt_tokens=opening.prompt_tokens,
        hit_tokens=opening.hit_tokens,
        prior_token_ids=opening.prior_token_ids,
        is_resumed=opening.is_resumed,
        prior_events=opening.prior_events,
    )


def to_finish_stream(stream_id: int, ending: Ending) -> tokenizer_pb2.FinishStream:
    return tokenizer_pb2.FinishStream(
        stream_id=stream_id,
        reason=WIRE_END_REASONS[ending.reason],
        failure=to_failure(ending.failure) if ending.failure is not None else None,
        receipt_json=ending.receipt_json,
        hit_tokens=ending.hit_tokens,
        other_choices=ending.other_choices,
    )


def to_error(message: decode_pb2.Finished) -> ShoalError | None:
    return from_failure(message.failure) if message.HasField("failure") else None


def split_tokens(stream_ids: bytes, counts: bytes, token_ids: bytes) -> Iterator[tuple[int, bytes]]:
    """(stream id, its packed tokens) of each column entry. ValueError when the columns do not fit."""
    streams, lengths = unpack_u32(stream_ids), unpack_u32(counts)
    if sum(lengths) * TOKEN_BYTES != len(token_ids):
        raise ValueError("token columns do not fit")
    start = 0
    for stream_id, length in zip(streams, lengths, strict=True):
        end = start + length * TOKEN_BYTES
        yield stream_id, token_ids[start:end]
        start = end


def split_events(reply: tokenizer_pb2.ConverseReply) -> Iterator[tuple[int, bytes, int | None, int]]:
    """(stream id, its events, tokens parsed so far, how many events) of each column entry. ValueError when the columns
    do not fit."""
    streams, lengths = unpack_u32(reply.stream_ids), unpack_u32(reply.lengths)
    parsed = unpack_u32(reply.parsed_tokens) if reply.parsed_tokens else [None] * len(streams)
    counts = unpack_u32(reply.event_counts) if reply.event_counts else [0] * len(streams)
    if sum(lengths) != len(reply.events):
        raise ValueError("event columns do not fit")
    start = 0
    for stream_id, length, parsed_tokens, count in zip(streams, lengths, parsed, counts, strict=True):
        yield stream_id, reply.events[start : start + length], parsed_tokens, count
        start += length
