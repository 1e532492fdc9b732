"""What was asked of this instance of late: block hashes by request, so that a miss can be explained afterwards.

Neither prompts nor tokens are here; a hash names tokens without telling them. Of a request that asks again the last
time counts. Bounded by the bytes of hashes: a long prompt pushes out several short ones.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

from shoal_kvblocks import HASH_BYTES, count_hashes
from shoal_kvindex.departures import Departure
from shoal_kvindex.names import Namespace

RECORD_BYTES = 600  # of Python objects around one record


@dataclass(frozen=True, slots=True)
class FirstMiss:
    """What the directory had of the first block after the hit when it was asked for."""

    is_marked: bool = False
    is_incomplete: bool = False  # stored, without all that a hit needs of it
    departure: Departure | None = None  # of a block that is not stored


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """One request as it was matched. ``hashes`` goes on with its answer once the request is settled."""

    request_id: str
    namespace: Namespace
    hashes: bytes
    whole_blocks: int
    hit_blocks: int
    asked_at_s: int  # Unix
    first_miss: FirstMiss = FirstMiss()

    @property
    def weight_bytes(self) -> int:
        return len(self.hashes) + RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Relative:
    """An earlier request that begins with the same ``shared_blocks`` blocks. ``is_other``: it goes on after them, with
    other ones."""

    request_id: str
    shared_blocks: int
    is_other: bool


class RecentPrompts:
    """On one event loop; the ones asked longest ago leave at ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._prompts: OrderedDict[str, AskedPrompt] = OrderedDict()
        self._bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._prompts)

    def remember(self, asked: AskedPrompt) -> None:
        """Takes the place of what the same request asked before."""
        self._forget(asked.request_id)
        self._put(asked)

    def settled(self, request_id: str, hashes: bytes) -> None:
        """The blocks of prompt and answer; nothing for requests that are not remembered, or that do not fit."""
        asked = self._prompts.get(request_id)
        if asked is not None and len(hashes) > len(asked.hashes) and hashes.startswith(asked.hashes):
            self._bytes += len(hashes) - len(asked.hashes)
            self._prompts[request_id] = replace(asked, hashes=hashes)  # its place in the order is when it asked
            self._hold_bound()

    def get(self, request_id: str) -> AskedPrompt | None:
        return self._prompts.get(request_id)

    def relatives(self, asked: AskedPrompt) -> list[Relative]:
        """Requests that asked before this one and share its first block, in their order. Looks at all of them, which
        is milliseconds: for explanations only."""
        own = asked.hashes[: asked.whole_blocks * HASH_BYTES]
        first, found = own[:HASH_BYTES], []
        for other in self._prompts.values():
            if other.request_id == asked.request_id:
                break  # later ones changed nothing for it
            if first and other.namespace == asked.namespace and other.hashes.startswith(first):
                shared_blocks = common_blocks(own, other.hashes)
                is_other = shared_blocks < min(count_hashes(own), count_hashes(other.hashes))
                found.append(Relative(other.request_id, shared_blocks, is_other))
        return found

    def _put(self, asked: AskedPrompt) -> None:
        self._prompts[asked.request_id] = asked
        self._bytes += asked.weight_bytes
        self._hold_bound()

    def _hold_bound(self) -> None:
        while self._bytes > self._max_bytes:
            self._forget(next(iter(self._prompts)))

    def _forget(self, request_id: str) -> None:
        asked = self._prompts.pop(request_id, None)
        if asked is not None:
            self._bytes -= asked.weight_bytes


def common_blocks(one: bytes, other: bytes) -> int:
    """How many leading hashes are equal. They are chained: equal at one place, equal before it."""
    low, high = 0, min(count_hashes(one), count_hashes(other))
    while low < high:
        middle = (low + high + 1) // 2
        here = slice((middle - 1) * HASH_BYTES, middle * HASH_BYTES)
        if one[here] == other[here]:
            low = middle
        else:
            high = middle - 1
    return low
