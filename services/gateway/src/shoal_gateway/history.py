"""Whether a conversation's history, encoded again, is what was generated; where not, the first token that differs.

A bounded memory of recent answers under the hash of the last whole block of their prompt. A next turn whose prompt
has that block, and goes on as that prompt did, is compared. Knowing nothing is the normal case (another gateway
answered, the record was evicted) and says nothing about the store. Only for receipts: no decision depends on it.
"""

from collections import OrderedDict
from dataclasses import dataclass

from shoal_gateway.request import TOKEN_BYTES, Blocks
from shoal_kvblocks import split_hashes

RECORD_BYTES = 200  # of Python objects around one record


@dataclass(frozen=True, slots=True)
class _Record:
    tail: bytes  # of the prompt, after its last whole block
    answer: bytes

    @property
    def weight_bytes(self) -> int:
        return len(self.tail) + len(self.answer) + RECORD_BYTES


class AnswerHistory:
    """Used on one event loop; the least recently written records are evicted at ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._records: OrderedDict[tuple[str, bytes], _Record] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def remember(self, pool: str, blocks: Blocks, prompt: bytes, answer: bytes) -> None:
        """Record a finished answer. Nothing for prompts without a whole block: they cannot be found again."""
        if not blocks.whole_blocks or not answer:
            return
        key = (pool, split_hashes(blocks.hashes)[-1])
        self._evict(key)
        record = _Record(prompt[_end_of(blocks.whole_blocks, blocks) :], answer)
        self._records[key] = record
        self._bytes += record.weight_bytes
        while self._bytes > self._max_bytes:
            self._evict(next(iter(self._records)))

    def diverged_at_token(self, pool: str, blocks: Blocks, prompt: bytes) -> int | None:
        """Index of the first prompt token that differs from a remembered answer; None: none does, or not known."""
        hashes = split_hashes(blocks.hashes)
        for whole_blocks in range(len(hashes), 0, -1):
            record = self._records.get((pool, hashes[whole_blocks - 1]))
            if record is None:
                continue
            start = _end_of(whole_blocks, blocks)
            if prompt.startswith(record.tail, start):
                return _first_difference(prompt, start + len(record.tail), record.answer)
        return None

    def _evict(self, key: tuple[str, bytes]) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._bytes -= record.weight_bytes


def _end_of(whole_blocks: int, blocks: Blocks) -> int:
    return whole_blocks * blocks.block_tokens * TOKEN_BYTES


def _first_difference(prompt: bytes, start: int, answer: bytes) -> int | None:
    there = prompt[start : start + len(answer)]
    if there == answer[: len(there)]:
        return None
    for at in range(0, len(there), TOKEN_BYTES):
        if there[at : at + TOKEN_BYTES] != answer[at : at + TOKEN_BYTES]:
            return (start + at) // TOKEN_BYTES
    return None
