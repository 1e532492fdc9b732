"""What an operator may not set."""

import pytest

from shoal_kvindex.settings import KvIndexSettings


@pytest.mark.parametrize(
    ("variable", "value"),
    [("POSTGRES_URL", "garbage"), ("LOW_WATERMARK", "0.95"), ("CHAT_LIFETIME_S", "10000000000000000000")],
)
def test_what_cannot_work_stops_the_start_with_a_sentence(variable: str, value: str) -> None:
    with pytest.raises(SystemExit, match="settings are not valid"):
        KvIndexSettings.load("kvindex", {f"SHOAL_KVINDEX_{variable}": value})
