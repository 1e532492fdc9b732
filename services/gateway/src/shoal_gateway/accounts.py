"""What holds of every settled request, whatever became of it: its accounts add up, and are closed once.

Checked in production at each settlement. A broken account is a bug of ours, never the caller's: it is logged as an
error with the request's id and counted in a metric that must stay 0.
"""

import enum
from collections.abc import Iterator

from shoal_gateway.receipt import Receipt


class BrokenAccount(enum.Enum):
    """A rule that does not hold. A metric label."""

    SETTLED_TWICE = "settled_twice"
    MORE_HIT_THAN_ASKED = "more_hit_than_asked"  # hit + miss = prompt, and neither is negative
    TOKENS_NOT_SHOWN = "tokens_not_shown"  # generated for the client, and not in its answer; or the reverse
    UNCOUNTED = "uncounted"  # it finished, and nobody knows with how many tokens


def broken_accounts(receipt: Receipt) -> Iterator[BrokenAccount]:
    """Every rule that this receipt breaks at its settlement."""
    if receipt.is_settled:
        yield BrokenAccount.SETTLED_TWICE
    counts = (receipt.prompt_tokens, receipt.hit_tokens, receipt.miss_tokens, receipt.completion_tokens)
    if any(count is not None and count < 0 for count in counts):
        yield BrokenAccount.MORE_HIT_THAN_ASKED
    if receipt.tokens_not_shown:
        yield BrokenAccount.TOKENS_NOT_SHOWN
    if receipt.outcome == "finished" and any(count is None for count in counts):
        yield BrokenAccount.UNCOUNTED
