"""Metrics of a decode worker."""

from shoal_runtime.metrics import Catalogue

CATALOGUE = Catalogue("shoal_decode")

PLACEMENTS = CATALOGUE.counter(
    "placements_total",
    "Placements by verdict: accepted, or why they were refused.",
    ["verdict"],
    action="too_many_requests or no_room on all workers: add decode workers. other_pool: gateways see an old beat.",
)
STREAMS = CATALOGUE.counter(
    "streams_total",
    "Streams that ended, by outcome.",
    ["outcome"],
    action="engine_failed or crashed: read the log. unread: a gateway is too slow. lost: gateways or network break.",
)
RUNNING = CATALOGUE.gauge(
    "running_requests",
    "Requests that are placed here now.",
    action="At its limit for long: add decode workers. One far over the mean: look at placement.",
)
PROMPT_TOKENS = CATALOGUE.counter(
    "prompt_tokens_total",
    "Prompt tokens (resumed ones included) of streams that started.",
    action="With hit_tokens_total: the share that had to be computed here.",
)
HIT_TOKENS = CATALOGUE.counter(
    "hit_tokens_total",
    "Prompt tokens that were not computed here.",
    action="A falling share of prompt_tokens_total: the store loses blocks or prefill does not hand over in time.",
)
TOKENS = CATALOGUE.counter(
    "tokens_total",
    "Generated tokens that were sent.",
    action="The throughput of this worker; compare with its kind.",
)
REPLIES = CATALOGUE.counter(
    "replies_total",
    "Messages that carried them.",
    action="Tokens a message falling towards 1 while many requests run: batching is broken, CPU cost rises.",
)
FIRST_TOKEN = CATALOGUE.histogram(
    "first_token_seconds",
    "From acceptance to the first step.",
    action="Rising: loads are slow, or prompts are computed here; see hit_tokens_total.",
)
FAILED_LOADS = CATALOGUE.gauge(
    "failed_loads",
    "Requests since start whose stored KV could not be loaded and was computed.",
    action="Not zero: look at the store of this node.",
)
STORE_LOST = CATALOGUE.gauge(
    "store_lost",
    "1 while the engine cannot reach the store of its node.",
    action="Start the lmcache server again; until then nothing is hit here and every prompt is computed.",
)
