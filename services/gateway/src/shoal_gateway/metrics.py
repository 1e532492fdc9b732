"""The gateway's metrics; everything about requests is counted once, from their receipts."""

from shoal_gateway.receipt import Receipt
from shoal_runtime.metrics import TOKEN_BUCKETS, Catalogue

CATALOGUE = Catalogue("shoal_gateway")

REQUESTS = CATALOGUE.counter(
    "requests_total",
    "Requests that ended, by outcome.",
    ["outcome"],
    action="failed: look at the log line request.settled for the error; refused: add workers or raise the bounds.",
)
FALLBACKS = CATALOGUE.counter(
    "fallbacks_total",
    "Times a request went on although something did not go the way it should, by what.",
    ["fallback"],
    action="Each value names the part to look at; docs/operations.md has a line for each.",
)
PROMPT_TOKENS = CATALOGUE.counter(
    "prompt_tokens_total", "Prompt tokens of requests that reached an engine.", action="The load; compare with hits."
)
HIT_TOKENS = CATALOGUE.counter(
    "hit_tokens_total",
    "Prompt tokens that were loaded instead of computed.",
    action="A falling share of prompt_tokens_total: look at the store's room and at expiry.",
)
COMPLETION_TOKENS = CATALOGUE.counter(
    "completion_tokens_total", "Tokens that were generated for clients.", action="The load on decode workers."
)
DIVERGED = CATALOGUE.counter(
    "diverged_requests_total",
    "Requests whose history was encoded differently from what had been generated.",
    action="Often: the template does not render answers as they were generated; hits end there.",
)
TTFT = CATALOGUE.histogram(
    "ttft_seconds",
    "From the arrival of a request to its first token.",
    action="Compare with prefill queue and compute in the receipts.",
)
DURATION = CATALOGUE.histogram(
    "request_seconds", "From the arrival of a request to its last event.", ["outcome"], action="Look at TTFT first."
)
PROMPT_LENGTH = CATALOGUE.histogram(
    "prompt_length_tokens", "Length of prompts.", action="Choose prefill tiers by it.", buckets=TOKEN_BUCKETS
)
SHARED_WAITS = CATALOGUE.counter(
    "shared_waits_total",
    "Requests that waited for a prefix which another request had computed, by how the wait ended.",
    ["outcome"],
    action="time_over: reports or the store are slower than computing; given_up: prefill jobs fail; look at both.",
)
SHARED_WAIT = CATALOGUE.histogram(
    "shared_wait_seconds",
    "Time that these requests waited.",
    action="Compare with prefill compute: much longer waits mean that prefill is slower than its pace of late.",
)
PREFILL_QUEUE = CATALOGUE.histogram(
    "prefill_queue_seconds",
    "Time of prefill jobs that was neither computing nor waiting for the store.",
    action="Grows with too few prefill workers.",
)
RUNNING = CATALOGUE.gauge(
    "running_requests", "Requests that are admitted now.", action="At its bound: later ones wait or are refused."
)
WAITING = CATALOGUE.gauge("waiting_requests", "Requests that wait for admission.", action="Add gateways or workers.")
SETTLE_DROPPED = CATALOGUE.counter(
    "settle_dropped_total",
    "Claims of blocks that could not be delivered to the index.",
    action="Blocks of these requests expire earlier than they should; look at kvindex.",
)
PUT_ASIDE = CATALOGUE.counter(
    "peers_put_aside_total",
    "Times a peer did not answer or broke a connection, so that others are asked first for a while.",
    ["role"],
    action="Grows without restarts of that role: an instance beats and does not serve; look at it, or at the network.",
)
BROKEN_ACCOUNTS = CATALOGUE.counter(
    "broken_accounts_total",
    "Settled requests whose accounts do not add up, by the rule that they break.",
    ["rule"],
    action="Must be 0. Otherwise report it, with the log line request.accounts_broken.",
)
PREFILL_CANCELS = CATALOGUE.counter(
    "prefill_cancels_total", "Prefill jobs that were cancelled.", action="None; shows clients that leave early."
)


def count(receipt: Receipt) -> None:
    """Everything that one settled request moves."""
    outcome = receipt.outcome or "failed"
    REQUESTS.labels(outcome).inc()
    for fallback in receipt.fallbacks:
        FALLBACKS.labels(fallback.value).inc()
    if receipt.hit_tokens is not None and receipt.prompt_tokens is not None:
        PROMPT_TOKENS.inc(receipt.prompt_tokens)
        HIT_TOKENS.inc(receipt.hit_tokens)
    if receipt.completion_tokens:
        COMPLETION_TOKENS.inc(receipt.completion_tokens)
    if receipt.diverged_at_token is not None:
        DIVERGED.inc()
    if receipt.ttft_ms is not None:
        TTFT.observe(receipt.ttft_ms / 1000)
    if receipt.total_ms is not None:
        DURATION.labels(outcome).observe(receipt.total_ms / 1000)
    if receipt.prompt_tokens is not None:
        PROMPT_LENGTH.observe(receipt.prompt_tokens)
    if receipt.shared is not None and receipt.shared.waited_ms is not None:
        SHARED_WAITS.labels(receipt.shared.outcome or "cancelled").inc()
        SHARED_WAIT.observe(receipt.shared.waited_ms / 1000)
    if receipt.prefill is not None and receipt.prefill.queue_ms is not None:
        PREFILL_QUEUE.observe(receipt.prefill.queue_ms / 1000)
