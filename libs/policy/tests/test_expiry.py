"""Blocks live as long as the longest of their uses asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_policy import ExpiryPolicy, TrafficClass
from shoal_policy.expiry import DAY_S

POLICY = ExpiryPolicy()
CLASSES = st.sampled_from(TrafficClass)
TIMES_S = st.floats(0, 2e9)


@pytest.mark.parametrize(
    ("traffic_class", "lifetime_s"),
    [(TrafficClass.CHAT, 7 * DAY_S), (TrafficClass.AGENT, 3 * DAY_S), (TrafficClass.PROBE, 600.0)],
)
def test_lifetimes(traffic_class: TrafficClass, lifetime_s: float) -> None:
    assert POLICY.renew(None, 100.0, traffic_class) == 100.0 + lifetime_s


def test_agent_does_not_shorten_what_a_chat_asked_for() -> None:
    assert POLICY.renew(7 * DAY_S, 0.0, TrafficClass.AGENT) is None


def test_small_gain_is_not_written() -> None:
    assert POLICY.renew(7 * DAY_S, 0.05 * 7 * DAY_S, TrafficClass.CHAT) is None
    assert POLICY.renew(7 * DAY_S, 0.2 * 7 * DAY_S, TrafficClass.CHAT) == pytest.approx(1.2 * 7 * DAY_S)


@given(st.none() | TIMES_S, TIMES_S, CLASSES)
def test_expiry_never_moves_back(expires_at_s: float | None, now_s: float, traffic_class: TrafficClass) -> None:
    renewed_s = POLICY.renew(expires_at_s, now_s, traffic_class)
    assert renewed_s is None or expires_at_s is None or renewed_s > expires_at_s
    assert renewed_s is None or renewed_s == now_s + POLICY.lifetime_s(traffic_class)
