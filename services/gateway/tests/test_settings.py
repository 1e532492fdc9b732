"""Settings come from the environment; a wrong one stops the start."""

import pytest

from shoal_gateway.settings import GatewaySettings


def test_default_address_is_loopback_8000() -> None:
    settings = GatewaySettings.load("gateway", {})
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)


def test_address_is_set_by_name() -> None:
    settings = GatewaySettings.load("gateway", {"SHOAL_GATEWAY_HOST": "0.0.0.0", "SHOAL_GATEWAY_PORT": "9000"})
    assert (settings.host, settings.port) == ("0.0.0.0", 9000)


def test_groups_are_set_by_their_name() -> None:
    environ = {
        "SHOAL_GATEWAY_POSTGRES_URL": "postgresql://shoal@db/shoal",
        "SHOAL_GATEWAY_POSTGRES_PASSWORD": "secret",
        "SHOAL_GATEWAY_RESPONSE_RETENTION_DAYS": "0.5",
    }
    settings = GatewaySettings.load("gateway", environ)
    assert settings.postgres.database_url == "postgresql://shoal:secret@db/shoal"
    assert settings.response.retention_days == 0.5
    assert GatewaySettings.load("gateway", {}).response.retention_days == 30


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PROT", "1"),
        ("POSTGRES_URL", "garbage"),
        ("RESPONSE_RETENTION_DAYS", "0"),
        ("RESPONSE", "1"),
        ("TIERS", "short:10"),
        ("PORT", "99999"),
        ("HEAD_WAIT_S", "0"),
    ],
)
def test_wrong_setting_stops_the_start_and_is_named(name: str, value: str) -> None:
    with pytest.raises(SystemExit, match=f"SHOAL_GATEWAY_{name}"):
        GatewaySettings.load("gateway", {f"SHOAL_GATEWAY_{name}": value})
