"""What `docker compose` makes of its files, and the promises that hold for every container."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.compose

ONCE = {"password", "migrate", "migrate-gateway", "model", "shoal"}
ADMIN_API = {"kvstore", "kvindex", "prefill", "decode"}


def config(root: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    argv = ("docker", "compose", *arguments, "--profile", "*", "config", "--format", "json")
    return subprocess.run(
        argv, cwd=root, env={**environ, **settings}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def services(root: Path) -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = json.loads(config(root, "--env-file", os.devnull).stdout)["services"]
    return services


@pytest.mark.parametrize("env_file", [os.devnull, ".env.example"])
def test_it_warns_of_nothing(root: Path, env_file: str) -> None:
    told = config(root, "--env-file", env_file)
    assert (told.returncode, told.stderr) == (0, "")


def test_it_warns_of_nothing_when_everything_is_set(root: Path, tmp_path: Path) -> None:
    lines = [line[1:] for line in (root / ".env.example").read_text().splitlines() if line[:2].isascii()]
    every = tmp_path / "every.env"
    every.write_text("\n".join(line for line in lines if "=" in line and not line.startswith(" ")))
    told = config(root, "--env-file", str(every))
    assert (told.returncode, told.stderr) == (0, "")


def test_only_the_way_to_the_gateways_is_published(services: dict[str, dict[str, Any]]) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert list(published) == ["front"]
    assert [(port["host_ip"], port["published"]) for port in published["front"]] == [("127.0.0.1", "8000")]
    assert not [name for name, service in services.items() if service.get("network_mode") not in (None, "none")]


def test_the_admin_api_is_on_a_network_of_those_who_use_it(root: Path, services: dict[str, dict[str, Any]]) -> None:
    assert list(services["kvstore"]["networks"]) == ["store"]
    assert {name for name, service in services.items() if "store" in service.get("networks", {})} == ADMIN_API
    networks = json.loads(config(root, "--env-file", os.devnull).stdout)["networks"]
    assert {name for name, network in networks.items() if not network.get("internal")} == {"edge", "hub"}


def test_every_container_is_bounded_and_has_no_rights(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"] and "cap_add" not in service and "privileged" not in service, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert int(service["mem_limit"]) > 0 and service["pids_limit"] > 0, name
        assert service["logging"] == {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}}, name
        assert service["restart"] == ("no" if name in ONCE else "unless-stopped"), name


def test_nobody_is_stopped_before_it_has_drained(root: Path, services: dict[str, dict[str, Any]]) -> None:
    assert {name: service["stop_grace_period"] for name, service in services.items() if name not in ONCE} == {
        name: "45s" for name in services if name not in ONCE
    }
    assert "#SHOAL_DRAIN_S=20\n#SHOAL_STOP_GRACE=45s\n" in (root / ".env.example").read_text()


def test_everything_waits_for_what_it_needs(services: dict[str, dict[str, Any]]) -> None:
    waits = {
        name: {other: told["condition"] for other, told in service.get("depends_on", {}).items()}
        for name, service in services.items()
    }
    done, well = "service_completed_successfully", "service_healthy"
    assert waits["kvindex"] == {"nats": well, "postgres": well, "migrate": done}
    assert waits["gateway"] == {"nats": well, "postgres": well, "migrate-gateway": done}
    assert waits["migrate"] == waits["migrate-gateway"] == {"postgres": well}
    assert waits["tokenizer"] == {"nats": well, "model": done}
    for engine in ("prefill", "decode"):
        assert waits[engine] == {"nats": well, "model": done, "kvstore": "service_started"}


def test_settings_reach_their_service_from_the_shell_and_from_a_file(root: Path, tmp_path: Path) -> None:
    (tmp_path / "my.env").write_text("SHOAL_DECODE_MAX_UNREAD_TOKENS=99\nSHOAL_GATEWAY_PORT=9000\n")
    told = config(root, "--env-file", str(tmp_path / "my.env"), SHOAL_LOG_LEVEL="DEBUG", SHOAL_GATEWAY_HOST="0.0.0.0")
    services = json.loads(told.stdout)["services"]
    assert services["decode"]["environment"]["SHOAL_DECODE_MAX_UNREAD_TOKENS"] == "99"
    assert services["gateway"]["environment"]["SHOAL_LOG_LEVEL"] == "DEBUG"
    assert services["gateway"]["environment"]["SHOAL_GATEWAY_PORT"] == "8000"
    (port,) = services["front"]["ports"]
    assert (port["host_ip"], port["published"], port["target"]) == ("0.0.0.0", "9000", 8000)
