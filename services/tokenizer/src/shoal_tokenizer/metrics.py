"""The tokenizer's metrics."""

from shoal_runtime.metrics import TOKEN_BUCKETS, Catalogue

CATALOGUE = Catalogue("shoal_tokenizer")

REQUESTS = CATALOGUE.counter(
    "requests_total",
    "Encode and Count calls, by outcome (OK or the error code).",
    ["outcome"],
    action="INVALID_REQUEST and UNSUPPORTED show what clients get wrong; OVERLOADED asks for more instances.",
)
ENCODE_SECONDS = CATALOGUE.histogram(
    "encode_seconds",
    "Time of a successful Encode or Count, waiting for a thread included.",
    action="When it rises while prompts do not grow, threads are short: add instances.",
)
PROMPT_TOKENS = CATALOGUE.histogram(
    "prompt_tokens",
    "Length of encoded prompts.",
    buckets=TOKEN_BUCKETS,
    action="A shift moves work between prefill tiers.",
)
ENCODES_TAKEN = CATALOGUE.gauge(
    "encodes_taken",
    "Requests that are being encoded or wait for a thread.",
    action="Near the bound of threads and places requests are refused: add instances.",
)
ANSWERS_OPEN = CATALOGUE.gauge(
    "answers_open",
    "Answers that are being formatted.",
    action="When it grows without more traffic, a gateway forgets to finish its streams.",
)
ANSWERS = CATALOGUE.counter(
    "answers_total",
    "Formatted answers by how they ended: stop, length, cancel, failure, or error when formatting itself failed.",
    ["finish"],
    action="error is a bug or a gateway of another version; failure points at the engines.",
)
ANSWER_TOKENS = CATALOGUE.counter(
    "answer_tokens_total",
    "Generated tokens of answers that ended.",
    action="The service's throughput; compare with the CPU time of the process.",
)
