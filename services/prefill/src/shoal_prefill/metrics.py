"""Metrics of a prefill worker."""

from shoal_prefill.prefill_job import Prefilled, Settled
from shoal_runtime.metrics import Catalogue

CATALOGUE = Catalogue("shoal_prefill")

JOBS = CATALOGUE.counter(
    "jobs_total",
    "Jobs that left this worker, by outcome.",
    ["outcome"],
    action="failed: read job.settled in the log. given_back or answer_lost: workers restart, or NATS breaks. "
    "caller_lost: gateways die.",
)
HIT_TOKENS = CATALOGUE.counter(
    "hit_tokens_total",
    "Prompt tokens of answered jobs that were not computed.",
    action="A falling share of hit and miss tokens: the store loses blocks, or traffic changed.",
)
MISS_TOKENS = CATALOGUE.counter(
    "miss_tokens_total",
    "Prompt tokens of answered jobs that were computed.",
    action="The throughput of this worker; add workers to the tier when it is at what its kind can do.",
)
COMPUTE_SECONDS = CATALOGUE.histogram(
    "compute_seconds",
    "Engine time of a job, loading included.",
    action="Rising at equal miss tokens: the engine or the load from the store is slow.",
)
HANDOFFS = CATALOGUE.counter(
    "handoffs_total",
    "Answered jobs by what was known of their last whole block: yes, unknown, none.",
    ["stored"],
    action="unknown: the store or its reports are slow; decode computes again what it does not find.",
)
STORE_WAIT_SECONDS = CATALOGUE.histogram(
    "store_wait_seconds",
    "Time a job waited for the store after it was computed.",
    action="Near handoff_wait_ms: look at the store before raising the setting.",
)
INDEX_FAILURES = CATALOGUE.counter(
    "index_failures_total",
    "Questions to kvindex that were not answered, by error code.",
    ["code"],
    action="Look at kvindex; hand-offs go on without knowing.",
)
RUNNING_JOBS = CATALOGUE.gauge(
    "running_jobs",
    "Jobs that are computed here now.",
    action="At its limit for long: add prefill workers.",
)
FAILED_LOADS = CATALOGUE.gauge(
    "failed_loads",
    "Requests, since start, whose stored KV could not be loaded and was computed.",
    action="Growing: stored blocks are corrupt or gone; look at the store.",
)
PREFETCHED_BLOCKS = CATALOGUE.counter(
    "prefetched_blocks_total",
    "Blocks that lay in the node's DRAM after prefetching for jobs that waited for their turn in the engine.",
    action="None while jobs wait and hit: look at failed_prefetches and at SHOAL_ENGINE_STORE_HTTP_PORT.",
)
PREFETCH_SECONDS = CATALOGUE.histogram(
    "prefetch_seconds",
    "Time to bring the blocks of one job: what the engine did not spend on loading them.",
    action="Rising at equal blocks: the shared level is slow.",
)
FAILED_PREFETCHES = CATALOGUE.gauge(
    "failed_prefetches",
    "Prefetches, since start, that the store did not do; their jobs were loaded by the engine.",
    action="Growing: look for prefetch.lost in the log and at the HTTP side of the lmcache server.",
)
STORE_LOST = CATALOGUE.gauge(
    "store_lost",
    "1 while the engine cannot reach the store of its node.",
    action="Start the lmcache server again; until then nothing is hit here, and decode computes it all again.",
)


def count(settled: Settled) -> None:
    """One job left this worker."""
    JOBS.labels(settled.outcome.value).inc()
    answer = settled.answer
    if isinstance(answer, Prefilled):
        HIT_TOKENS.inc(answer.hit_tokens)
        MISS_TOKENS.inc(answer.miss_tokens)
        COMPUTE_SECONDS.observe(answer.compute_ms / 1000)
        HANDOFFS.labels(answer.stored.value).inc()
        STORE_WAIT_SECONDS.observe(answer.store_wait_ms / 1000)
        if answer.prefetched_blocks:
            PREFETCHED_BLOCKS.inc(answer.prefetched_blocks)
            PREFETCH_SECONDS.observe(answer.prefetch_ms / 1000)
