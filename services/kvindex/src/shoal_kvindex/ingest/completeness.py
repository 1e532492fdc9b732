"""Whether the index knows all that is stored, and what a listing has to find out.

A fence (a gap, a new life, silence) means that copies may be missing: the DRAM of that server and the shared level
have to be listed. The lease holder lists: it tells "not complete" first, which is the mark in the log that divides
the fences that this listing covers from later ones, and "complete" when it is done. Every instance applies both in
the log's order, so whoever takes over knows what is left to list. Nothing here is durable: a new index lists once.
docs/decisions/0007-the-store-tells-the-truth.md
"""

from shoal_kvindex.ingest.changes import IndexState

NOT_LISTED = "nothing was listed since the start"


class Completeness:
    """On one event loop. Until the first word of a lease holder the index is not complete."""

    def __init__(self) -> None:
        self._fenced: dict[str, bool] = {}  # instance id: whether the listing under way covers it
        self._state: IndexState | None = None

    @property
    def state(self) -> IndexState | None:
        """The last word of the lease holder."""
        return self._state

    @property
    def is_complete(self) -> bool:
        return self._state is not None and self._state.is_complete and not self._fenced

    @property
    def reason(self) -> str:
        """Why it is not complete; "" when it is."""
        if self.is_complete:
            return ""
        if self._state is not None and not self._state.is_complete and self._state.reason:
            return self._state.reason
        return f"to be listed: {', '.join(sorted(self._fenced))}" if self._fenced else NOT_LISTED

    @property
    def unlisted(self) -> frozenset[str]:
        """Servers whose DRAM has to be listed, and with it the shared level. Ask after "not complete" was told."""
        return frozenset(self._fenced)

    def fence(self, instance_id: str) -> None:
        """What this server has is not known any more."""
        self._fenced[instance_id] = False

    def leave(self, instance_id: str) -> None:
        """The server left in order: nothing of it is left to list."""
        self._fenced.pop(instance_id, None)

    def tell(self, state: IndexState) -> None:
        """The lease holder's word."""
        self._state = state
        if state.is_complete:
            self._fenced = {instance_id: False for instance_id, is_covered in self._fenced.items() if not is_covered}
        else:
            self._fenced = dict.fromkeys(self._fenced, True)
