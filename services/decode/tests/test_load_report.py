from shoal_decode.acceptance import Occupancy
from shoal_decode.load_report import limits_of, presence_of
from shoal_engine.api import EngineDescription, EngineLoad, StateGroup, StateKind
from shoal_runtime.presence import ServedGroup

GROUPS = (StateGroup(0, StateKind.SLIDING_WINDOW, 256), StateGroup(1, StateKind.FULL))
DESCRIPTION = EngineDescription("model", "pool", 128, 8192, max_running_requests=16, groups=GROUPS)


def a_load(max_cached_tokens: int | None = 100_000) -> EngineLoad:
    return EngineLoad(0, 3, 0, max_cached_tokens, 0)


def test_limits_are_the_engines_unless_settings_are_lower() -> None:
    assert limits_of(DESCRIPTION, a_load(), None, 0).max_running_requests == 16
    assert limits_of(DESCRIPTION, a_load(), 4, 0).max_running_requests == 4
    assert limits_of(DESCRIPTION, a_load(), 99, 0).max_running_requests == 16


def test_unknown_room_is_room_for_every_request_at_full_length() -> None:
    assert limits_of(DESCRIPTION, a_load(None), 4, 0).max_cached_tokens == 4 * 8192


def test_beat_counts_placements_and_what_waits_in_the_engine() -> None:
    limits = limits_of(DESCRIPTION, a_load(), None, 0)
    presence = presence_of("host:1", DESCRIPTION, limits, Occupancy(5, 700), a_load())
    assert presence.model is not None
    assert (presence.address, presence.model.pool, presence.model.block_tokens) == ("host:1", "pool", 128)
    assert presence.model.groups == (ServedGroup(0, 256), ServedGroup(1))
    assert presence.load is not None
    assert (presence.load.running_requests, presence.load.max_running_requests) == (5, 16)
    assert (presence.load.cached_tokens, presence.load.max_cached_tokens) == (700, 100_000)
    assert presence.load.waiting_requests == 3
