"""What workers say of their groups, as the directory takes it."""

from shoal_kvindex.kinds import LayerGroup, PoolLayout, Window
from shoal_kvindex.layouts import layout_of
from shoal_runtime.presence import Served, ServedGroup


def test_groups_become_a_layout() -> None:
    groups = (ServedGroup(0, 300, is_replayable=True), ServedGroup(1))
    layout = layout_of(Served("model", "pool", 128, groups=groups))
    assert layout == PoolLayout(128, (LayerGroup(0, 300, is_replayable=True), LayerGroup(1)))
    assert layout.windows == (Window(0, 300, 3, is_replayable=True),)


def test_who_says_nothing_of_groups_gives_no_layout() -> None:
    assert layout_of(Served("model", "pool", 128)) is None
    assert layout_of(Served("model", "", 128, groups=(ServedGroup(0),))) is None


def test_reported_groups_that_nobody_explained_are_needed_of_every_block() -> None:
    layout = PoolLayout(128, (LayerGroup(0, 256), LayerGroup(1)))
    assert layout.everywhere({0}) == {1}
    assert layout.everywhere({0, 1, 7}) == {1, 7}
