"""What this worker says about itself with each beat.

The numbers come from placements, which are ahead of the engine: a gateway must see a request that it placed a
moment ago. Only what waits inside the engine is the engine's own word. docs/decisions/0005-decode-is-placed.md
"""

from shoal_decode.acceptance import Limits, Occupancy
from shoal_engine.api import EngineDescription, EngineLoad
from shoal_engine.wire import to_served
from shoal_runtime.presence import Load, Presence, Served


def limits_of(
    description: EngineDescription, load: EngineLoad, max_running_requests: int | None, max_local_prefill_tokens: int
) -> Limits:
    """Limits of a started engine. An engine that does not tell its room can hold every request at full length."""
    running_requests = min(max_running_requests or description.max_running_requests, description.max_running_requests)
    cached_tokens = load.max_cached_tokens
    return Limits(
        pool=description.pool,
        max_context_tokens=description.max_context_tokens,
        max_running_requests=running_requests,
        max_cached_tokens=running_requests * description.max_context_tokens if cached_tokens is None else cached_tokens,
        max_local_prefill_tokens=max_local_prefill_tokens,
    )


def presence_of(
    address: str, description: EngineDescription, limits: Limits, occupancy: Occupancy, load: EngineLoad
) -> Presence:
    """The content of one beat."""
    return Presence(
        address=address,
        model=Served(
            description.model,
            description.pool,
            description.block_tokens,
            description.max_context_tokens,
            groups=to_served(description.groups),
        ),
        load=Load(
            running_requests=occupancy.running_requests,
            max_running_requests=limits.max_running_requests,
            cached_tokens=occupancy.cached_tokens,
            max_cached_tokens=limits.max_cached_tokens,
            waiting_requests=load.waiting_requests,
        ),
    )
