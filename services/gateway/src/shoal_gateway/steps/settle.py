"""Step 7: close the accounts of a request, whatever became of it.

Blocks of prompt and answer are claimed in the index, the answer is remembered for the next turn's receipt, and the
receipt goes to log and metrics. Nothing here waits, and nothing here can fail the request any more.
"""

from collections.abc import Callable

from shoal_gateway.accounts import broken_accounts
from shoal_gateway.history import AnswerHistory
from shoal_gateway.metrics import BROKEN_ACCOUNTS
from shoal_gateway.ports import KvIndex
from shoal_gateway.receipt import Receipt
from shoal_gateway.request import BlockClaim, Blocks, RequestPlan
from shoal_kvblocks import extend_hashes
from shoal_runtime.logs import get_logger

log = get_logger(__name__)


class SettleStep:
    """Shared by all requests."""

    def __init__(self, index: KvIndex, history: AnswerHistory, count: Callable[[Receipt], None]) -> None:
        self._index = index
        self._history = history
        self._count = count

    def claim(self, plan: RequestPlan, blocks: Blocks, answer: bytes, *, is_finished: bool) -> None:
        """For requests that reached decode. A broken-off answer is claimed too: the next turn may repeat it."""
        prompt, model = plan.prompt, plan.model
        hashes = extend_hashes(blocks.hashes, prompt.token_ids + answer, model.block_tokens, prompt.items)
        if hashes:
            claim = BlockClaim(plan.request_id, model.pool, plan.cache_salt, hashes, prompt.traffic_class)
            self._index.settle(claim)
        if is_finished:
            self._history.remember(model.pool, blocks, prompt.token_ids, answer)

    def record(self, receipt: Receipt) -> None:
        """One line and the counters, once a request."""
        broken = list(broken_accounts(receipt))
        if broken:
            log.error("request.accounts_broken", rules=[rule.value for rule in broken], **receipt.fields())
        if not receipt.is_settled:
            receipt.is_settled = True
            self._count(receipt)
            log.info("request.settled", **receipt.fields())
        for rule in broken:
            BROKEN_ACCOUNTS.labels(rule.value).inc()
