"""Names, sources and refusals of settings."""

import socket
from pathlib import Path

import pytest
from pydantic import Field, SecretStr

from shoal_runtime.settings import SETTINGS_WRONG, EnvironmentSettings, ServiceSettings


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


def test_an_invalid_value_is_told_by_the_name_under_which_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="  SHOAL_GRPC_PORT: ") as raised:
        _Settings.load("gateway", {"SHOAL_GRPC_PORT": "70000"})
    assert raised.value.code == SETTINGS_WRONG
    assert "SHOAL_GRPC_PORT" in capsys.readouterr().err  # an exit code alone tells a person nothing


def test_a_group_without_shared_fields_reads_its_prefix_only() -> None:
    class _Engine(EnvironmentSettings):
        log_level: str = "INFO"

    assert _Engine.load("engine", {"SHOAL_LOG_LEVEL": "DEBUG"}).log_level == "INFO"


class _Policy(EnvironmentSettings):
    days: int = Field(30, ge=1)
    password: SecretStr = SecretStr("")


class _WithPolicy(ServiceSettings):
    policy: _Policy = _Policy()


def test_a_group_in_a_field_is_read_under_its_name(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret\n")
    environ = {"SHOAL_GATEWAY_POLICY_DAYS": "7", "SHOAL_GATEWAY_POLICY_PASSWORD_FILE": str(file)}
    policy = _WithPolicy.load("gateway", environ).policy
    assert (policy.days, policy.password.get_secret_value()) == (7, "secret")
    assert _WithPolicy.load("gateway", {"SHOAL_POLICY_DAYS": "7"}).policy.days == 30


@pytest.mark.parametrize(
    ("variable", "value"), [("POLICY_DAYS", "0"), ("POLICY_DAYS", "x"), ("POLICY", "7"), ("POLICY_DAY", "7")]
)
def test_a_wrong_value_in_a_group_is_told_by_its_variable(variable: str, value: str) -> None:
    with pytest.raises(SystemExit, match=rf"SHOAL_GATEWAY_{variable}\b"):
        _WithPolicy.load("gateway", {f"SHOAL_GATEWAY_{variable}": value})


class _WithSecret(ServiceSettings):
    password: SecretStr = SecretStr("")


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    file = tmp_path / "password"
    file.write_text("p@ss word\n")
    return str(file)


def test_a_secret_may_be_given_by_a_file(secret_file: str) -> None:
    settings = _WithSecret.load("gateway", {"SHOAL_GATEWAY_PASSWORD_FILE": secret_file})
    assert settings.password.get_secret_value() == "p@ss word"
    assert "p@ss" not in repr(settings)


def test_a_secret_that_is_given_twice_stops_the_start(secret_file: str) -> None:
    environ = {"SHOAL_GATEWAY_PASSWORD_FILE": secret_file, "SHOAL_GATEWAY_PASSWORD": "other"}
    with pytest.raises(SystemExit, match="SHOAL_GATEWAY_PASSWORD and SHOAL_GATEWAY_PASSWORD_FILE are both set"):
        _WithSecret.load("gateway", environ)


def test_a_secret_whose_file_is_missing_names_variable_and_file() -> None:
    with pytest.raises(SystemExit, match=r"SHOAL_GATEWAY_PASSWORD_FILE=/nowhere/at-all cannot be read: No such file"):
        _WithSecret.load("gateway", {"SHOAL_GATEWAY_PASSWORD_FILE": "/nowhere/at-all"})


def test_only_secrets_are_read_from_files() -> None:
    with pytest.raises(SystemExit, match="SHOAL_GATEWAY_HANDOFF_MS_FILE is no setting"):
        _Settings.load("gateway", {"SHOAL_GATEWAY_HANDOFF_MS_FILE": "/tmp/x"})


@pytest.mark.parametrize(
    ("host", "advertise_host", "told"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("localhost", "", "localhost"),
        ("0.0.0.0", "", socket.gethostname()),
        ("::", "", socket.gethostname()),
        ("10.1.2.3", "", "10.1.2.3"),
        ("node-7", "", "node-7"),
        ("0.0.0.0", "worker.example", "worker.example"),
    ],
)
def test_what_others_are_told_follows_from_where_it_listens(host: str, advertise_host: str, told: str) -> None:
    assert _Settings(host=host, advertise_host=advertise_host).reachable_host == told
