"""Which blocks some request has computed just now, so that others can wait for them instead of computing them again.

A request claims the blocks after its hit. The claim ends when they are stored, when the request ends it, or when its
time passes: whoever made it may have died. Each instance keeps its own view, fed by the log; a claim holds here at
once and elsewhere when the log has brought it, so two requests that reach two instances in the same moment may both
claim, and compute twice. Bounded by blocks: past the bound a claim is not taken, and nobody waits for it. Pure.
docs/decisions/0012-one-computation-for-one-prefix.md
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal_kvindex.names import Namespace

LONGEST_S = 120.0  # nobody believes in a claim for longer, whatever it says
LOOK_EACH_S = 1.0  # between two looks at all claims for lapsed ones; a question never sees a lapsed one


@dataclass(frozen=True, slots=True)
class PendingRun:
    """Leading blocks of a prompt that are stored or computed by ``request_id``."""

    blocks: int
    request_id: str


@dataclass(slots=True)
class _Claim:
    namespace: Namespace
    until_s: float
    open_hashes: set[bytes] = field(default_factory=set)


class Prefixes:
    """On one event loop; all times are monotonic. A claim lasts ``longest_s`` at most."""

    def __init__(self, max_blocks: int, longest_s: float = LONGEST_S) -> None:
        self._max_blocks = max_blocks
        self._longest_s = longest_s
        self._claims: dict[str, _Claim] = {}
        self._owners: dict[tuple[Namespace, bytes], str] = {}
        self._looked_at_s = 0.0

    def __len__(self) -> int:
        """Pending blocks, lapsed ones that nobody looked at included."""
        return len(self._owners)

    def pending(
        self, namespace: Namespace, hashes: Sequence[bytes], hit_blocks: int, request_id: str, now_s: float
    ) -> PendingRun | None:
        """Who computes the first block after the hit, and how far; None when nobody does or the asking request.

        A hash names everything before it, so who computes a block computes all that this prompt has before it.
        """
        owner = self._owner(namespace, hashes[hit_blocks], now_s) if hit_blocks < len(hashes) else None
        if owner is None or owner == request_id:
            return None
        theirs = self._claims[owner].open_hashes
        last = next(i for i in range(len(hashes) - 1, hit_blocks - 1, -1) if hashes[i] in theirs)
        return PendingRun(last + 1, owner)

    def claim(self, namespace: Namespace, hashes: Iterable[bytes], request_id: str, for_s: float, now_s: float) -> bool:
        """From now on the request has these blocks computed, but for those that another one has. False: the bound
        is reached. A request has one claim; a new one takes the place of the old."""
        self.end(request_id)
        free = {block_hash for block_hash in hashes if self._owner(namespace, block_hash, now_s) is None}
        is_over = len(self._owners) + len(free) > self._max_blocks
        if is_over or now_s - self._looked_at_s >= LOOK_EACH_S:
            self._end_lapsed(now_s)
        if not free or len(self._owners) + len(free) > self._max_blocks:
            return False
        self._claims[request_id] = _Claim(namespace, now_s + min(for_s, self._longest_s), free)
        self._owners.update(((namespace, block_hash), request_id) for block_hash in free)
        return True

    def hear(self, namespace: Namespace, hashes: Sequence[bytes], request_id: str, for_s: float, now_s: float) -> None:
        """What the log says, also of this instance's own claims; twice is the same as once."""
        if for_s > 0:
            self.claim(namespace, hashes, request_id, for_s, now_s)
        else:
            self.end(request_id)

    def end(self, request_id: str) -> Namespace | None:
        """The request has nothing computed any more; the namespace of its claim, None when it had none."""
        claim = self._claims.pop(request_id, None)
        if claim is None:
            return None
        for block_hash in claim.open_hashes:
            del self._owners[claim.namespace, block_hash]
        return claim.namespace

    def is_pending(self, namespace: Namespace, block_hash: bytes) -> bool:
        """Whether ``stored`` would change anything."""
        return (namespace, block_hash) in self._owners

    def is_wanted(self, namespace: Namespace, block_hash: bytes, now_s: float) -> bool:
        """Whether some request has this block computed now."""
        return self._owner(namespace, block_hash, now_s) is not None

    def stored(self, namespace: Namespace, block_hash: bytes) -> None:
        """The block can be read now: nobody waits for it any more."""
        owner = self._owners.pop((namespace, block_hash), None)
        if owner is None:
            return
        claim = self._claims[owner]
        claim.open_hashes.discard(block_hash)
        if not claim.open_hashes:
            del self._claims[owner]

    def _owner(self, namespace: Namespace, block_hash: bytes, now_s: float) -> str | None:
        owner = self._owners.get((namespace, block_hash))
        if owner is not None and self._claims[owner].until_s <= now_s:
            self.end(owner)
            return None
        return owner

    def _end_lapsed(self, now_s: float) -> None:
        self._looked_at_s = now_s
        for request_id in [owner for owner, claim in self._claims.items() if claim.until_s <= now_s]:
            self.end(request_id)
