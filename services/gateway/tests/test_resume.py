"""A transcript knows what the client has seen and what is left to show."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_contracts.errors import Unavailable
from shoal_contracts.ids import pack_u32, unpack_u32
from shoal_gateway.request import TokenBatch
from shoal_gateway.resume import Transcript


def a_batch(*tokens: int) -> TokenBatch:
    return TokenBatch(pack_u32(tokens), tuple(b"%d" % token for token in tokens))


def test_nothing_was_shown_before_the_first_event() -> None:
    transcript = Transcript()
    transcript.add(a_batch(1, 2))
    assert transcript.prior_token_ids() == b""
    assert transcript.rest() == a_batch(1, 2)
    assert not transcript.has_events


def test_opening_events_alone_show_no_token() -> None:
    transcript = Transcript()
    transcript.show(0, 1)
    assert transcript.has_events
    assert transcript.prior_token_ids() == b""


def test_stream_whose_reach_is_unknown_cannot_move() -> None:
    transcript = Transcript()
    transcript.add(a_batch(1, 2))
    transcript.show(None, 1)
    with pytest.raises(Unavailable):
        transcript.rest()
    assert list(unpack_u32(transcript.token_ids)) == [1, 2]


@given(st.lists(st.tuples(st.lists(st.integers(0, 2**32 - 1), max_size=5), st.booleans())))
def test_shown_and_rest_are_the_whole(steps: list[tuple[list[int], bool]]) -> None:
    transcript, everything, events = Transcript(), [], 0
    for tokens, is_shown in steps:
        transcript.add(a_batch(*tokens))
        everything += tokens
        if is_shown:
            transcript.show(len(everything) - len(tokens) // 2, 2)
            events += 2
        prior, rest = transcript.prior_token_ids(), transcript.rest()
        assert prior + rest.token_ids == transcript.token_ids == pack_u32(everything)
        assert rest.logprobs == a_batch(*unpack_u32(rest.token_ids)).logprobs
    assert transcript.completion_tokens == len(everything)
    assert transcript.shown_events == events
