"""What an operator may not set."""

from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from shoal_kvindex.settings import KvIndexSettings


@pytest.mark.parametrize(
    ("variable", "value"),
    [("POSTGRES_URL", "garbage"), ("LOW_WATERMARK", "0.95"), ("CHAT_LIFETIME_S", "10000000000000000000")],
)
def test_what_cannot_work_stops_the_start_with_a_sentence(variable: str, value: str) -> None:
    with pytest.raises(SystemExit, match="settings are not valid"):
        KvIndexSettings.load("kvindex", {f"SHOAL_KVINDEX_{variable}": value})


def test_a_password_that_stands_apart_reaches_the_database_whatever_its_letters(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("p@ss/word:1%\n")
    environ = {
        "SHOAL_KVINDEX_POSTGRES_URL": "postgresql://shoal@postgres:5432/shoal",
        "SHOAL_KVINDEX_POSTGRES_PASSWORD_FILE": str(file),
    }
    url = make_url(KvIndexSettings.load("kvindex", environ).postgres.database_url)
    assert (url.username, url.password, url.host, url.port, url.database) == (
        *("shoal", "p@ss/word:1%"),
        *("postgres", 5432, "shoal"),
    )


def test_a_password_in_the_url_stays() -> None:
    url = "postgresql://shoal:secret@postgres/shoal"
    assert KvIndexSettings.load("kvindex", {"SHOAL_KVINDEX_POSTGRES_URL": url}).postgres.database_url == url
