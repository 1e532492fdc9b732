"""What tests of several packages share; needs nothing but contracts, so that a service can be tested alone.

Servers, processes, fakes and contract suites need more and are imported from their modules.
"""

from shoal_testkit.builders import POOL, a_generate_request, a_prefill_job, tokens
from shoal_testkit.clock import VirtualClock, settle
from shoal_testkit.waits import until

__all__ = [
    "POOL",
    "VirtualClock",
    "a_generate_request",
    "a_prefill_job",
    "settle",
    "tokens",
    "until",
]
