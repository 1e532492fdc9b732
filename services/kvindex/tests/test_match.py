"""The longest usable prefix against a plain reading of its definition."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_kvindex.directory import SHARED, Level, Part, Place, Readable
from shoal_kvindex.kinds import LayerGroup, PoolLayout
from shoal_kvindex.match import Hit, longest_prefix
from shoal_kvindex.readable import Stretch, is_whole, readable

NODES = ("node-a", "node-b")
IDS = st.frozensets(st.sampled_from(NODES))
READABLE = st.tuples(st.booleans(), IDS).map(lambda drawn: Readable(*drawn))
EVERYWHERE = Readable(True, frozenset(NODES))
L2_ONLY = Readable(True, frozenset())
A_ONLY, B_ONLY = Readable(False, frozenset({"node-a"})), Readable(False, frozenset({"node-b"}))


def alone(run: list[Readable]) -> list[Stretch]:
    """Each block its own stretch, also where neighbours are alike."""
    return [(block, 1) for block in run]


def leading(run: list[Readable], holds: list[bool]) -> int:
    return holds.index(False) if False in holds else len(run)


@settings(deadline=None, max_examples=50)
@given(st.lists(READABLE, max_size=12))
def test_hit_is_the_longest_run_that_one_server_and_the_shared_level_hold_together(run: list[Readable]) -> None:
    # A server that has nothing reads the shared level alone.
    expected = max(leading(run, [r.is_shared or node in r.instance_ids for r in run]) for node in (*NODES, "idle"))
    assert longest_prefix(alone(run)).blocks == expected


@settings(deadline=None, max_examples=50)
@given(st.lists(READABLE, max_size=12))
def test_each_place_tells_its_own_leading_copies_longest_first(run: list[Readable]) -> None:
    hit = longest_prefix(alone(run))
    expected = {SHARED: leading(run, [r.is_shared for r in run])}
    for node in NODES:
        expected[Place(Level.L1, node)] = leading(run, [node in r.instance_ids for r in run])
    assert dict(hit.at) == {place: blocks for place, blocks in expected.items() if blocks}
    assert [blocks for _, blocks in hit.at] == sorted((blocks for _, blocks in hit.at), reverse=True)


def test_copies_scattered_over_two_servers_are_no_prefix() -> None:
    assert longest_prefix(alone([A_ONLY, B_ONLY])).blocks == 1
    assert longest_prefix(alone([A_ONLY, L2_ONLY, A_ONLY])).blocks == 3


def test_nothing_known() -> None:
    assert longest_prefix([]) == Hit(0)


def test_all_known_everywhere() -> None:
    hit = longest_prefix([(EVERYWHERE, 600)])
    assert hit.blocks == 600
    assert len(hit.at) == 3


BLOCK_TOKENS = 4
RANKS = (0x02000200, 0x02010201)
OBJECTS = st.frozensets(
    st.tuples(
        st.sampled_from([SHARED, Place(Level.L1, "node-a"), Place(Level.L1, "node-b")]),
        st.builds(Part, st.sampled_from(RANKS), st.integers(0, 2)),
    ),
    max_size=14,
)
# Mostly whole blocks, so that prefixes grow long enough for windows to matter.
EVERY_PART = [Part(rank, group) for rank in RANKS for group in range(3)]
PLENTY = st.tuples(
    st.sampled_from([SHARED, Place(Level.L1, "node-a"), Place(Level.L1, "node-b")]),
    st.sets(st.sampled_from(EVERY_PART), max_size=2),
    OBJECTS,
).map(lambda drawn: frozenset((drawn[0], part) for part in EVERY_PART if part not in drawn[1]) | drawn[2])
GROUPS = st.tuples(
    *(
        st.builds(LayerGroup, st.just(group), st.one_of(st.none(), st.integers(1, 20)), st.booleans())
        for group in range(3)
    )
)
Objects = frozenset[tuple[Place, Part]]


def naive(blocks: list[Objects], layout: PoolLayout) -> tuple[int, int]:
    """Every length, at every server: blocks and replay tokens."""
    best = (0, 0)
    for node in (*NODES, "idle"):
        here = [{part for place, part in block if place in (SHARED, Place(Level.L1, node))} for block in blocks]
        for length in range(1, len(blocks) + 1):
            replay_tokens = 0
            is_usable = True
            for group in layout.groups:
                tokens = length * layout.block_tokens if group.window_tokens is None else group.window_tokens
                first = max(0, length - -(-tokens // layout.block_tokens))
                if all(is_whole(parts, {group.object_group_id}) for parts in here[first:length]):
                    continue
                if group.window_tokens is not None and group.is_replayable:
                    replay_tokens = max(replay_tokens, min(group.window_tokens, length * layout.block_tokens))
                else:
                    is_usable = False
            if is_usable:
                best = max(best, (length, replay_tokens), key=lambda found: (found[0], -found[1]))
    return best


@settings(deadline=None, max_examples=100)
@given(st.lists(st.one_of(PLENTY, PLENTY, PLENTY, OBJECTS), max_size=10), GROUPS)
def test_every_kind_is_there_or_is_replayed(blocks: list[Objects], groups: tuple[LayerGroup, ...]) -> None:
    layout = PoolLayout(BLOCK_TOKENS, groups)
    windowed = [window.object_group_id for window in layout.windows]
    run = [readable(block, layout.everywhere({0, 1, 2}), windowed) for block in blocks]
    hit = longest_prefix(alone(run), layout)
    assert (hit.blocks, hit.replay_tokens) == naive(blocks, layout)
    assert all(blocks <= hit.blocks for _, blocks in hit.at)


NOWHERE = Readable(False, frozenset())
GEMMA = PoolLayout(128, (LayerGroup(0, 256), LayerGroup(1)))
REPLAYING = PoolLayout(128, (LayerGroup(0, 256, is_replayable=True), LayerGroup(1)))


def test_a_window_is_needed_of_the_last_blocks_only() -> None:
    tail = L2_ONLY._replace(windows=(L2_ONLY,))
    body = L2_ONLY._replace(windows=(NOWHERE,))
    assert longest_prefix([(body, 8), (tail, 2)], GEMMA).blocks == 10
    assert longest_prefix([(body, 9), (tail, 1)], GEMMA).blocks == 0
    assert longest_prefix([(tail, 3), (body, 7)], GEMMA).blocks == 3


def test_a_missing_window_that_the_engine_rebuilds_costs_its_tokens() -> None:
    body = L2_ONLY._replace(windows=(NOWHERE,))
    assert longest_prefix([(body, 10)], REPLAYING) == Hit(10, 256, ((SHARED, 10),))
    assert longest_prefix([(body, 1)], REPLAYING) == Hit(1, 128, ((SHARED, 1),))


def test_a_window_in_the_memory_of_one_server_joins_the_shared_level() -> None:
    tail = L2_ONLY._replace(windows=(A_ONLY,))
    body = L2_ONLY._replace(windows=(NOWHERE,))
    assert longest_prefix([(body, 8), (tail, 2)], GEMMA).blocks == 10
    assert longest_prefix([(body, 8), (tail, 2)], REPLAYING).replay_tokens == 0
