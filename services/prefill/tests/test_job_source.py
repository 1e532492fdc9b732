"""Between protobuf and dataclasses, both ways."""

import pytest

from shoal_contracts.errors import BadRequest, Unavailable
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2 as pb
from shoal_contracts.v1 import prefill_pb2
from shoal_engine.api import Item
from shoal_prefill.job_source import to_answer, to_job
from shoal_prefill.prefill_job import Prefilled, Stored


def a_message(token_ids: bytes) -> prefill_pb2.PrefillJob:
    return prefill_pb2.PrefillJob(
        request_id="r1",
        pool="pool",
        tier="all",
        cache_salt="tenant",
        token_ids=token_ids,
        items=[pb.Item(offset_tokens=1, length_tokens=2, identifier="image")],
        sampling=pb.Sampling(temperature=0, seed=7, max_tokens=100, stop_token_ids=[5], logit_bias={3: -1.0}),
        budget_ms=1500,
        expected_hit_tokens=256,
        dram_store_ids=["node-a", "node-b"],
    )


def test_a_job_arrives_whole() -> None:
    packed = pack_u32([1, 2, 3, 4])
    job = to_job(a_message(packed))
    request = job.request
    assert (job.pool, job.packed_token_ids, job.budget_s) == ("pool", packed, 1.5)
    assert (request.request_id, list(request.token_ids), request.cache_salt) == ("r1", [1, 2, 3, 4], "tenant")
    assert request.items == (Item(1, 2, "image"),)
    assert (job.expected_hit_tokens, job.dram_store_ids) == (256, ("node-a", "node-b"))
    assert (request.sampling.temperature, request.sampling.seed, request.sampling.top_p) == (0.0, 7, None)
    assert (request.sampling.stop_token_ids, dict(request.sampling.logit_bias)) == ((5,), {3: -1.0})


def test_a_hit_that_nobody_asked_for_is_unknown() -> None:
    message = a_message(pack_u32([1, 2]))
    message.ClearField("expected_hit_tokens")
    assert to_job(message).expected_hit_tokens is None


@pytest.mark.parametrize("token_ids", [b"", b"123"])
def test_a_message_that_is_no_prompt_is_refused(token_ids: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        to_job(a_message(token_ids))
    assert caught.value.param == "token_ids"


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        (Stored.YES, prefill_pb2.STORED_YES),
        (Stored.UNKNOWN, prefill_pb2.STORED_UNKNOWN),
        (Stored.NONE, prefill_pb2.STORED_NONE),
    ],
)
def test_an_answer_is_told_whole(stored: Stored, told: prefill_pb2.Stored.ValueType) -> None:
    message = to_answer("r1", "prefill-1", 2, Prefilled(256, 44, stored, 0, 120, 8, 2, 30))
    assert (message.request_id, message.instance_id, message.delivery) == ("r1", "prefill-1", 2)
    done = message.done
    assert (done.hit_tokens, done.miss_tokens, done.stored, done.compute_ms, done.store_wait_ms) == (
        256,
        44,
        told,
        120,
        8,
    )
    assert (done.prefetched_blocks, done.prefetch_ms) == (2, 30)
    assert done.HasField("first_token") and done.first_token == 0


def test_no_first_token_is_told_by_its_absence() -> None:
    assert not to_answer("r1", "p", 1, Prefilled(0, 1, Stored.NONE, None, 1, 0)).done.HasField("first_token")


def test_a_failure_is_told_as_one() -> None:
    message = to_answer("r1", "p", 4, Unavailable(pb.TOO_MANY_DELIVERIES, "given up"))
    assert message.WhichOneof("outcome") == "failure"
    assert (message.failure.code, message.failure.message) == (pb.TOO_MANY_DELIVERIES, "given up")
