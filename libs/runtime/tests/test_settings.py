"""Names, sources and refusals of settings."""

import pytest
from pydantic import Field

from shoal_runtime.settings import EnvironmentSettings, ServiceSettings


class _Settings(ServiceSettings):
    handoff_ms: int = Field(500, ge=1)
    tiers: tuple[str, ...] = ("t0",)


def test_own_variable_wins_over_the_shared_one() -> None:
    environ = {"SHOAL_NATS_URL": "nats://shared", "SHOAL_GATEWAY_NATS_URL": "nats://own", "SHOAL_LOG_LEVEL": "DEBUG"}
    settings = _Settings.load("gateway", environ)
    assert (settings.nats_url, settings.log_level) == ("nats://own", "DEBUG")


def test_fields_of_the_service_are_not_shared() -> None:
    assert _Settings.load("gateway", {"SHOAL_HANDOFF_MS": "7"}).handoff_ms == 500
    assert _Settings.load("gateway", {"SHOAL_GATEWAY_HANDOFF_MS": "7"}).handoff_ms == 7


def test_sequences_are_written_with_commas() -> None:
    assert _Settings.load("gateway", {"SHOAL_GATEWAY_TIERS": "a, b"}).tiers == ("a", "b")


def test_unknown_variable_under_the_own_prefix_stops_the_start_and_names_near_ones() -> None:
    with pytest.raises(SystemExit, match=r"SHOAL_GATEWAY_HANDOF_MS.*SHOAL_GATEWAY_HANDOFF_MS"):
        _Settings.load("gateway", {"SHOAL_GATEWAY_HANDOF_MS": "7"})


def test_variables_of_other_services_are_not_ours() -> None:
    assert _Settings.load("gateway", {"SHOAL_DECODE_HANDOF_MS": "7"}).handoff_ms == 500


def test_invalid_value_names_the_variable() -> None:
    with pytest.raises(SystemExit, match="SHOAL_GATEWAY_HANDOFF_MS"):
        _Settings.load("gateway", {"SHOAL_GATEWAY_HANDOFF_MS": "0"})


def test_a_group_without_shared_fields_reads_its_prefix_only() -> None:
    class _Engine(EnvironmentSettings):
        log_level: str = "INFO"

    assert _Engine.load("engine", {"SHOAL_LOG_LEVEL": "DEBUG"}).log_level == "INFO"
