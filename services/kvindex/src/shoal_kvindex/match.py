"""The longest usable prefix: how many leading blocks one engine somewhere could load.

An engine reads the shared level and the DRAM of its own lmcache server, so a prefix is usable as far as there is
one server that, together with the shared level, has of every block what all blocks need, and of the last ones before
the end also the windows of those groups that need no more. A window that the engine can rebuild may be missing: that
costs the tokens that it computes again. Pure. docs/decisions/0011-state-kinds-have-their-own-policy.md
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shoal_kvindex.kinds import PoolLayout, Window
from shoal_kvindex.names import SHARED, Level, Place
from shoal_kvindex.readable import Readable, Stretch

Able: TypeAlias = frozenset[str] | None  # engines at these lmcache servers; None: everybody, also where DRAM is empty


@dataclass(frozen=True, slots=True)
class Hit:
    """Leading blocks of a prompt that are stored; the tokens inside them that the engine must compute again; ``at``
    tells for each place how many of the blocks have a copy just there, windows aside, longest first."""

    blocks: int
    replay_tokens: int = 0
    at: tuple[tuple[Place, int], ...] = ()


def longest_prefix(stretches: Sequence[Stretch], layout: PoolLayout | None = None) -> Hit:
    """``stretches`` say who can read the blocks, first ones first, and end at the first block that is not known."""
    usable = _usable(stretches)
    blocks, replay_tokens = (usable[-1].end, 0) if usable else (0, 0)
    if layout is not None and layout.windows:
        blocks, replay_tokens = _with_windows(stretches, usable, layout)
    counts = _leading_copies(stretches[: len(usable)])
    at = sorted(
        ((place, min(count, blocks)) for place, count in counts.items() if count and blocks),
        key=lambda item: (-item[1], -item[0].level, item[0].instance_id),
    )
    return Hit(blocks, replay_tokens, tuple(at))


class _Usable(NamedTuple):
    """Who can load all blocks up to the end of a stretch, windows aside."""

    end: int
    able: Able


def _usable(stretches: Iterable[Stretch]) -> list[_Usable]:
    """As far as there is somebody."""
    found: list[_Usable] = []
    end = 0
    able: Able = None
    for readable, length in stretches:
        able = _meet(able, _able(readable))
        if _is_nobody(able):
            break
        end += length
        found.append(_Usable(end, able))
    return found


def _leading_copies(stretches: Iterable[Stretch]) -> dict[Place, int]:
    """How far each place goes by itself."""
    counts: dict[Place, int] = {}
    end = shared_end = 0
    open_ids: frozenset[str] | None = None  # None: before the first block
    for readable, length in stretches:
        still_open = readable.instance_ids if open_ids is None else open_ids & readable.instance_ids
        if open_ids is not None and len(still_open) < len(open_ids):
            counts |= {Place(Level.L1, instance_id): end for instance_id in open_ids - still_open}
        open_ids = still_open
        if readable.is_shared and shared_end == end:
            shared_end += length
        end += length
        if not open_ids and shared_end < end:
            break
    counts |= {Place(Level.L1, instance_id): end for instance_id in open_ids or ()}
    counts[SHARED] = shared_end
    return counts


def _with_windows(stretches: Sequence[Stretch], usable: Sequence[_Usable], layout: PoolLayout) -> tuple[int, int]:
    """Blocks and replay tokens. Only the ends of stretches are tried: where a prefix may end inside of one, it may also
    end with it."""
    windows = list(enumerate(layout.windows))
    for last in range(len(usable) - 1, -1, -1):
        end, able = usable[last]
        for number, window in windows:
            if not window.is_replayable and not _is_nobody(able):
                able = _within(stretches, last, number, window, able)
        if not _is_nobody(able):
            break
    else:
        return 0, 0
    # Who has the window that costs most need not pay for it, and so on; the first that nobody has is to be paid.
    replays = [
        (min(window.tokens, end * layout.block_tokens), number, window)
        for number, window in windows
        if window.is_replayable
    ]
    for replay_tokens, number, window in sorted(replays, key=lambda replay: -replay[0]):
        able = _within(stretches, last, number, window, able)
        if _is_nobody(able):
            return end, replay_tokens
    return end, 0


def _within(stretches: Sequence[Stretch], last: int, number: int, window: Window, able: Able) -> Able:
    """Who of ``able`` can load this window for a prefix that ends with the stretch ``last``."""
    blocks = 0
    while last >= 0 and blocks < window.blocks and not _is_nobody(able):
        readable, length = stretches[last]
        able = _meet(able, _able(readable.windows[number]))
        blocks += length
        last -= 1
    return able


def _able(readable: Readable) -> Able:
    if readable.is_shared:
        return None
    return readable.instance_ids | readable.joined_ids if readable.joined_ids else readable.instance_ids


def _meet(some: Able, others: Able) -> Able:
    if some is None:
        return others
    return some if others is None else some & others


def _is_nobody(able: Able) -> bool:
    return able is not None and not able
