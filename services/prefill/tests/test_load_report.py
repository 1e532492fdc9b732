from shoal_engine.api import EngineDescription, EngineLoad, StateGroup, StateKind
from shoal_prefill.load_report import presence_of
from shoal_runtime.presence import ServedGroup

GROUPS = (StateGroup(0, StateKind.SLIDING_WINDOW, 256), StateGroup(1, StateKind.FULL))
DESCRIPTION = EngineDescription("model", "pool", 128, 8192, max_running_requests=16, groups=GROUPS)


def test_a_beat_tells_model_tiers_and_load() -> None:
    presence = presence_of(DESCRIPTION, ("short", "all"), 2, 3000, EngineLoad(2, 1, 2900, 100_000, 0))
    assert presence.model is not None and presence.load is not None
    assert (presence.model.pool, presence.model.tiers, presence.model.block_tokens) == ("pool", ("short", "all"), 128)
    assert presence.model.groups == (ServedGroup(0, 256), ServedGroup(1))
    assert (presence.load.running_requests, presence.load.cached_tokens) == (2, 3000)
    assert (presence.load.max_cached_tokens, presence.load.waiting_requests) == (100_000, 1)


def test_unknown_room_is_room_for_every_request_at_full_length() -> None:
    presence = presence_of(DESCRIPTION, ("all",), 0, 0, EngineLoad(0, 0, 0, None, 0))
    assert presence.load is not None and presence.load.max_cached_tokens == 16 * 8192
