"""What can be typed, and what is refused with a reason."""

import pytest

from shoal_local.arguments import parser


def test_options_reach_their_command():
    chosen = parser().parse_args(["logs", "gateway", "decode", "-f", "--level", "warning"])
    assert (chosen.services, chosen.follow, chosen.level) == (["gateway", "decode"], True, "warning")
    assert parser().parse_args(["bench", "--turns", "3"]).turns == 3
    assert parser().parse_args(["status", "--every", "0.5"]).every == 0.5
    assert parser().parse_args(["chat", "--temperature", "0"]).temperature == 0.0


@pytest.mark.parametrize(
    "typed",
    [
        ["bench", "--requests", "0"],
        ["bench", "--concurrency", "-1"],
        ["status", "--every", "0"],
        ["status", "--every", "nan"],
        ["chat", "--temperature", "-1"],
        ["chat", "--max-tokens", "many"],
        ["explain"],
        [],
    ],
)
def test_what_cannot_be_meant_is_refused(typed, capsys):
    with pytest.raises(SystemExit) as raised:
        parser().parse_args(typed)
    assert raised.value.code == 2
    assert "error:" in capsys.readouterr().err
