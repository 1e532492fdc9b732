"""What `shoal bench` measured, as tables. First turns have nothing stored, later ones have their history: shown apart.

Shares are ratios of sums. A percentile is a value that was measured: the smallest that as many were not above.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.text import Text

from shoal_local.terminal import table
from shoal_local.wording import counted, share


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request."""

    turn: int  # from 1
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None  # None: the answer was empty
    token_s: float | None  # None: fewer than two tokens


@dataclass(slots=True)
class Measured:
    """Grows while the load runs, so that what is there can be shown when it is stopped."""

    samples: list[Sample] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)  # by kind
    first_failures: dict[str, str] = field(default_factory=dict)  # what the first one of each kind said
    wall_s: float = 0.0

    def fail(self, kind: str, message: str) -> None:
        self.failures[kind] += 1
        self.first_failures.setdefault(kind, message)


def percentile(values: Iterable[float], part: float) -> float | None:
    """None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else None


def bench_tables(measured: Measured, planned: int) -> Group:
    """Everything, with what did not come to an end."""
    columns = [
        ("first turns (miss)", [sample for sample in measured.samples if sample.turn == 1]),
        ("later turns (hit)", [sample for sample in measured.samples if sample.turn > 1]),
    ]
    columns = [(name, samples) for name, samples in columns if samples]
    shown = table("", "", *(name for name, _ in columns), right=frozenset(name for name, _ in columns))
    for name, cell in ROWS:
        shown.add_row(name, *(cell(samples) for _, samples in columns))
    parts: list[RenderableType] = [shown] if columns else []
    return Group(*parts, *_totals(measured, planned))


def _ttft(part: float) -> Callable[[Sequence[Sample]], str]:
    return lambda samples: _seconds(percentile((s.ttft_s for s in samples if s.ttft_s is not None), part))


def _token_time(samples: Sequence[Sample]) -> str:
    middle = percentile((s.token_s for s in samples if s.token_s is not None), 0.5)
    return "-" if middle is None else f"{1000 * middle:.0f} ms"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _mean_prompt(samples: Sequence[Sample]) -> str:
    return f"{sum(s.prompt_tokens for s in samples) / len(samples):,.0f}"


def _cached(samples: Sequence[Sample]) -> str:
    return share(sum(s.cached_tokens for s in samples), sum(s.prompt_tokens for s in samples))


ROWS: tuple[tuple[str, Callable[[Sequence[Sample]], str]], ...] = (
    ("requests", lambda samples: f"{len(samples):,}"),
    ("tokens in, mean", _mean_prompt),
    ("cached of them", _cached),
    ("first token, p50", _ttft(0.5)),
    ("first token, p95", _ttft(0.95)),
    ("first token, max", _ttft(1.0)),
    ("each token after, p50", _token_time),
)


def _totals(measured: Measured, planned: int) -> Iterable[Text]:
    done, wall_s = len(measured.samples), measured.wall_s
    out = sum(sample.completion_tokens for sample in measured.samples)
    if done and wall_s:
        yield Text("")
        yield Text(f"{counted(done, 'request')} in {wall_s:.1f} s: {done / wall_s:.2f} a second")
        yield Text(
            f"{counted(out, 'token')} out: {out / wall_s:.1f} a second; {_cached(measured.samples)} of all in cached"
        )
    for kind, count in measured.failures.most_common():
        yield Text(f"{counted(count, 'error')}: {kind}\n{measured.first_failures[kind]}", "bad")
    missing = planned - done - measured.failures.total()
    if missing:
        yield Text(
            f"{counted(missing, 'request')} not answered: stopped, or after an error in their conversation", "odd"
        )
