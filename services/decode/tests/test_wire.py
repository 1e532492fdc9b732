import pytest

from shoal_contracts.errors import BadRequest
from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2, decode_pb2
from shoal_decode import wire
from shoal_decode.acceptance import Refusal
from shoal_decode.token_stream import Outcome, StreamEnd
from shoal_engine.api import Item, Sampling
from shoal_testkit.builders import POOL, a_generate_request, tokens


def test_placement_holds_everything_that_was_asked() -> None:
    message = a_generate_request(10, request_id="r1", max_tokens=9)
    message.cache_salt = "tenant"
    message.resumed_token_ids = pack_u32([4, 5])
    message.items.add(offset_tokens=2, length_tokens=3, identifier="image")
    message.is_local_prefill = True
    message.sampling.stop_token_ids.extend([7, 8])
    message.sampling.logit_bias[3] = -1.5
    placement = wire.placement(message)
    request = placement.request
    assert (placement.pool, placement.is_local_prefill, placement.budget_s, placement.tokens) == (POOL, True, 30.0, 12)
    assert (request.request_id, request.cache_salt) == ("r1", "tenant")
    assert (list(request.token_ids), list(request.resumed_token_ids)) == (tokens(10), [4, 5])
    assert request.items == (Item(2, 3, "image"),)
    assert request.sampling == Sampling(
        max_tokens=9, temperature=0.0, ignore_eos=True, stop_token_ids=(7, 8), logit_bias={3: -1.5}
    )


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"token_ids": b""}, "token_ids"),
        ({"token_ids": b"12345"}, "token_ids"),
        ({"resumed_token_ids": b"123"}, "resumed_token_ids"),
        ({"budget_ms": 0}, "budget_ms"),
        ({"request_id": ""}, "request_id"),
        ({"sampling": common_pb2.Sampling(temperature=float("nan"))}, "sampling"),
    ],
)
def test_placement_that_cannot_be_meant_names_its_field(change: dict[str, object], param: str) -> None:
    message = a_generate_request()
    for name in change:
        message.ClearField(name)  # type: ignore[arg-type]
    message.MergeFrom(decode_pb2.GenerateRequest(**change))  # type: ignore[arg-type]
    with pytest.raises(BadRequest) as bad:
        wire.placement(message)
    assert bad.value.param == param


def test_odd_cancel_is_a_bad_request() -> None:
    assert list(wire.cancelled(decode_pb2.ServeRequest(cancel=pack_u32([1, 2])))) == [1, 2]
    with pytest.raises(BadRequest):
        wire.cancelled(decode_pb2.ServeRequest(cancel=b"1"))


def test_every_refusal_and_every_outcome_has_a_wire_form() -> None:
    assert {refusal for refusal in Refusal if wire.refusal_error(refusal).message} == set(Refusal)
    for outcome in Outcome:
        message = wire.finished(1, StreamEnd(outcome, 3))
        assert (message.reason == common_pb2.FAILURE) == message.HasField("failure")
        assert message.completion_tokens == 3
    refused = wire.finished(1, StreamEnd(Outcome.ENGINE_REFUSED, 0, reason="make the schema simpler"))
    assert (refused.failure.code, refused.failure.message) == (common_pb2.INVALID_REQUEST, "make the schema simpler")
