from shoal_contracts.ids import unpack_u32
from shoal_contracts.v1 import common_pb2
from shoal_decode import wire
from shoal_decode.acceptance import Refusal
from shoal_decode.token_stream import Outcome, StreamEnd
from shoal_decode.turns import Slot, generate_reply, serve_replies
from shoal_engine.api import Step, TokenLogprobs


def slots(count: int, max_unread_tokens: int = 100) -> tuple[list[Slot], list[Slot]]:
    woken: list[Slot] = []
    return [Slot(i + 1, max_unread_tokens, woken.append) for i in range(count)], woken


def test_one_turn_is_one_message_of_columns() -> None:
    (first, second, third), woken = slots(3)
    first.accept()
    first.step(Step([10, 11], hit_tokens=128))
    second.step(Step([20]))
    third.refuse(wire.refusal_error(Refusal.NO_ROOM))
    second.finished(StreamEnd(Outcome.STOP, 7, 2))
    [reply] = serve_replies(woken)
    assert list(unpack_u32(reply.stream_ids)) == [1, 2]
    assert list(unpack_u32(reply.counts)) == [2, 1]
    assert list(unpack_u32(reply.token_ids)) == [10, 11, 20]
    assert [entry.stream_id for entry in reply.accepted] == [1]
    assert [(entry.stream_id, entry.hit_tokens) for entry in reply.started] == [(1, 128)]
    assert [(entry.stream_id, entry.failure.code) for entry in reply.refused] == [(3, common_pb2.OVERLOADED)]
    [end] = reply.finished
    assert (end.stream_id, end.reason, end.completion_tokens, end.stop_token_id) == (2, common_pb2.STOP, 7, 2)


def test_slot_that_waits_is_woken_once_and_merges_until_it_is_taken() -> None:
    (slot,), woken = slots(1)
    slot.step(Step([1], hit_tokens=0))
    slot.step(Step([2]))
    assert woken == [slot]
    [reply] = serve_replies(woken)
    assert list(unpack_u32(reply.counts)) == [2]
    slot.step(Step([3]))
    assert woken == [slot, slot]
    [reply] = serve_replies(woken[1:])
    assert list(unpack_u32(reply.token_ids)) == [3]
    assert not reply.started


def test_bound_on_what_waits_is_per_slot_and_starts_anew_after_a_message() -> None:
    (slow, other), woken = slots(2, max_unread_tokens=3)
    assert slow.step(Step([1, 2, 3]))
    assert not slow.step(Step([4]))
    assert other.step(Step([1]))
    serve_replies(woken)
    assert slow.step(Step([5]))


def test_logprobs_stand_beside_their_tokens() -> None:
    (slot,), woken = slots(1)
    slot.step(Step([5, 6], logprobs=[TokenLogprobs(-0.5, ((5, -0.5), (9, -2.0))), TokenLogprobs(-0.25)]))
    assert slot.weight_bytes() > 2 * 16
    [reply] = serve_replies(woken)
    [stream] = reply.logprobs
    first, second = stream.tokens
    assert (first.logprob, list(unpack_u32(first.top_token_ids)), list(first.top_logprobs)) == (
        -0.5,
        [5, 9],
        [-0.5, -2],
    )
    assert (second.logprob, second.top_token_ids) == (-0.25, b"")


def test_generate_reply_holds_the_same_for_one_stream() -> None:
    (slot,), _ = slots(1)
    slot.step(Step([5], hit_tokens=3, logprobs=[TokenLogprobs(-0.5)]))
    slot.finished(StreamEnd(Outcome.LENGTH, 1))
    reply = generate_reply(slot)
    assert (list(unpack_u32(reply.token_ids)), reply.started.hit_tokens, len(reply.logprobs)) == ([5], 3, 1)
    assert reply.finished.reason == common_pb2.LENGTH
    assert not generate_reply(slot).HasField("finished")
