"""Every prompt length has exactly one tier."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_policy import SINGLE_TIER, Tier, check_tiers, choose_tier, parse_tiers


def test_single_tier_takes_every_length() -> None:
    assert {choose_tier(tokens, SINGLE_TIER) for tokens in (0, 1, 77_000, 10**9)} == {"all"}


@pytest.mark.parametrize(
    ("tokens", "tier"),
    [(1, "short"), (16_383, "short"), (16_384, "medium"), (65_536, "long"), (262_144, "huge"), (10**7, "huge")],
)
def test_upper_bounds_are_exclusive(tokens: int, tier: str) -> None:
    assert choose_tier(tokens, parse_tiers("short:16384,medium:65536,long:262144,huge")) == tier


def test_tiers_are_read_from_one_line() -> None:
    assert parse_tiers("short:16384, all") == (Tier("short", 16_384), Tier("all"))


@pytest.mark.parametrize("text", ["", "short:100", "a:5,b:5,c", "a:9,b:5,c", "a,b", "a:1,a", "a:0,b", ":5,b"])
def test_tiers_with_gaps_or_overlaps_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_tiers(text)


@given(st.sets(st.integers(1, 10**6), max_size=6), st.integers(0, 2 * 10**6))
def test_chosen_tier_contains_the_length(bounds: set[int], tokens: int) -> None:
    tiers = (*(Tier(f"t{bound}", bound) for bound in sorted(bounds)), Tier("rest"))
    check_tiers(tiers)
    chosen = choose_tier(tokens, tiers)
    expected = min((bound for bound in bounds if tokens < bound), default=None)
    assert chosen == ("rest" if expected is None else f"t{expected}")
