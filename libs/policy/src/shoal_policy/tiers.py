"""Which prefill workers a prompt belongs to, by its length alone.

Long prompts would hold short ones up behind them; a tier is a queue of its own. The bounds are settings of the
fleet: one tier "all" suits a small one. docs/decisions/0003-prefill-is-pulled.md
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tier:
    """Prompts shorter than ``below_tokens`` that no earlier tier took; None has no upper end."""

    name: str
    below_tokens: int | None = None


SINGLE_TIER: tuple[Tier, ...] = (Tier("all"),)


def parse_tiers(text: str) -> tuple[Tier, ...]:
    """``"short:16384,all"``: names with their exclusive upper bounds, the last without one. ValueError otherwise."""
    tiers = []
    for part in text.split(","):
        name, _, bound = part.strip().partition(":")
        tiers.append(Tier(name, int(bound) if bound else None))
    check_tiers(tiers)
    return tuple(tiers)


def check_tiers(tiers: Sequence[Tier]) -> None:
    """ValueError unless every prompt length has exactly one tier."""
    if not tiers or tiers[-1].below_tokens is not None:
        raise ValueError("the last tier must have no upper bound")
    bounds = [tier.below_tokens for tier in tiers[:-1]]
    if any(bound is None or bound < 1 for bound in bounds):
        raise ValueError("every tier but the last needs an upper bound of at least 1 token")
    known = [bound for bound in bounds if bound is not None]
    if any(later <= earlier for earlier, later in itertools.pairwise(known)):
        raise ValueError("the upper bounds of tiers must grow")
    if len({tier.name for tier in tiers}) != len(tiers) or not all(tier.name for tier in tiers):
        raise ValueError("tiers need different names")


def choose_tier(prompt_tokens: int, tiers: Sequence[Tier] = SINGLE_TIER) -> str:
    """Name of the tier that serves a prompt of this length."""
    for tier in tiers:
        if tier.below_tokens is None or prompt_tokens < tier.below_tokens:
            return tier.name
    raise ValueError("the last tier must have no upper bound")
