"""What this worker says about itself with each beat."""

from collections.abc import Sequence

from shoal_engine.api import EngineDescription, EngineLoad
from shoal_engine.wire import to_served
from shoal_runtime.presence import Load, Presence, Served


def presence_of(
    description: EngineDescription, tiers: Sequence[str], running_jobs: int, prompt_tokens: int, load: EngineLoad
) -> Presence:
    """The content of one beat. No address: work is pulled, nobody calls a prefill worker.

    An engine that does not tell its room can hold every request at full length.
    """
    room = load.max_cached_tokens
    if room is None:
        room = description.max_running_requests * description.max_context_tokens
    return Presence(
        model=Served(
            description.model,
            description.pool,
            description.block_tokens,
            description.max_context_tokens,
            tuple(tiers),
            to_served(description.groups),
        ),
        load=Load(
            running_requests=running_jobs,
            max_running_requests=description.max_running_requests,
            cached_tokens=prompt_tokens,
            max_cached_tokens=room,
            waiting_requests=load.waiting_requests,
        ),
    )
