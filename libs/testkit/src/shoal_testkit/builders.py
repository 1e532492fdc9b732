"""Values for tests, valid as they are: a test names only what it is about.

Everything derives from the arguments, so equal calls give equal values, in this process and in any other.
"""

import itertools
import random

from shoal_contracts.ids import pack_u32
from shoal_contracts.v1 import common_pb2, decode_pb2, prefill_pb2

POOL = "pool-under-test"
TIER = "all"

_serial = itertools.count(1)


def tokens(count: int, seed: int = 0, *, vocabulary: int = 1000) -> list[int]:
    """Token ids that no other seed shares a block with."""
    return random.Random(seed).choices(range(vocabulary), k=count)


def a_generate_request(
    prompt_tokens: int = 300, *, seed: int = 0, request_id: str | None = None, max_tokens: int = 8, pool: str = POOL
) -> decode_pb2.GenerateRequest:
    """What a gateway places on a decode worker: greedy, and it runs to its length."""
    return decode_pb2.GenerateRequest(
        request_id=request_id or f"request-{next(_serial)}",
        pool=pool,
        token_ids=pack_u32(tokens(prompt_tokens, seed)),
        sampling=common_pb2.Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        budget_ms=30_000,
    )


def a_prefill_job(
    prompt_tokens: int = 300, *, seed: int = 0, request_id: str | None = None, answer_subject: str, pool: str = POOL
) -> prefill_pb2.PrefillJob:
    """What a gateway queues for prefill; the answer comes to ``answer_subject``."""
    return prefill_pb2.PrefillJob(
        request_id=request_id or f"request-{next(_serial)}",
        pool=pool,
        tier=TIER,
        answer_subject=answer_subject,
        token_ids=pack_u32(tokens(prompt_tokens, seed)),
        sampling=common_pb2.Sampling(temperature=0.0),
        budget_ms=30_000,
        traffic_class=common_pb2.CHAT,
    )
