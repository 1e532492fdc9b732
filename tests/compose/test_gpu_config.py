"""What `docker compose` makes of docker-compose.gpu.yml. No card is here: that it is accepted is all that is proved."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.compose

FILES = ("-f", "docker-compose.yml", "-f", "docker-compose.gpu.yml")
ON_CARDS = ("kvstore", "prefill", "decode")
ENGINES = ("prefill", "decode")


def config(root: Path, *files: str, env_file: str = os.devnull, **settings: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    argv = ("docker", "compose", "--env-file", env_file, *files, "--profile", "*", "config", "--format", "json")
    return subprocess.run(
        argv, cwd=root, env={**environ, **settings}, capture_output=True, text=True, timeout=60, check=False
    )


def services_of(root: Path, *files: str, **settings: str) -> dict[str, dict[str, Any]]:
    told = config(root, *files, **settings)
    services: dict[str, dict[str, Any]] = json.loads(told.stdout)["services"]
    return services


@pytest.fixture(scope="module")
def services(root: Path) -> dict[str, dict[str, Any]]:
    return services_of(root, *FILES)


@pytest.mark.parametrize("env_file", [os.devnull, ".env.example"])
def test_it_warns_of_nothing(root: Path, env_file: str) -> None:
    told = config(root, *FILES, env_file=env_file)
    assert (told.returncode, told.stderr) == (0, "")


def test_only_the_engines_and_their_store_are_given_cards(services: dict[str, dict[str, Any]]) -> None:
    assert {name for name, service in services.items() if "deploy" in service} == set(ON_CARDS)
    for name in ON_CARDS:
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": -1, "capabilities": ["gpu", "compute", "utility"]}, name
        assert services[name]["ulimits"]["memlock"] == {"soft": -1, "hard": -1}, name
        assert any(volume["source"] == "shm" for volume in services[name]["volumes"]), name


def test_cards_take_no_right_and_open_no_port(root: Path, services: dict[str, dict[str, Any]]) -> None:
    without = services_of(root)
    assert services.keys() == without.keys()
    for name, service in services.items():
        for promise in ("cap_drop", "cap_add", "security_opt", "read_only", "ports", "networks", "restart", "logging"):
            assert service.get(promise) == without[name].get(promise), (name, promise)
        assert int(service["mem_limit"]) > 0 and service["pids_limit"] > 0, name


def test_the_image_is_another_one_of_the_same_dockerfile(root: Path, services: dict[str, dict[str, Any]]) -> None:
    declared = set(re.findall(r"^ARG (\w+)", (root / "services/Dockerfile.engine").read_text(), re.MULTILINE))
    without = services_of(root)
    for name in ON_CARDS:
        build = services[name]["build"]
        assert build["dockerfile"] == "services/Dockerfile.engine"
        assert set(build["args"]) <= declared
        assert (build["args"]["SERVICE"], build["args"]["VLLM"]) == (name, "vllm")
        assert services[name]["image"] != without[name]["image"]
        given = (root / ".dockerignore").read_text().split()
        for file in (build["args"]["REQUIREMENTS"], build["args"]["CONSTRAINTS"]):
            assert (root / file).is_file() and f"!{file}" in given


def test_the_profiles_are_there_and_read_only(root: Path, services: dict[str, dict[str, Any]]) -> None:
    for name in ENGINES:
        (mount,) = (volume for volume in services[name]["volumes"] if volume["target"] == "/profiles")
        assert mount["read_only"] is True
        folder = Path(mount["source"])
        assert folder == root / "deploy/profiles"
        for path in services[name]["environment"]["SHOAL_ENGINE_PROFILE"].split(","):
            assert (folder / Path(path).relative_to("/profiles")).is_file()


def test_engines_on_one_card_start_one_after_the_other(root: Path, services: dict[str, dict[str, Any]]) -> None:
    waits = {other: told["condition"] for other, told in services["decode"]["depends_on"].items()}
    assert waits.pop("prefill") == "service_healthy"
    without = services_of(root)["decode"]["depends_on"]
    assert waits == {other: told["condition"] for other, told in without.items()}


def test_cards_and_profile_are_chosen_by_settings(root: Path) -> None:
    settings = {"SHOAL_CARDS_PREFILL": "0,1", "SHOAL_CARDS_DECODE": "2,3", "SHOAL_ENGINE_PROFILE": "/profiles/own.yaml"}
    services = services_of(root, *FILES, **settings)
    told = {name: services[name]["environment"] for name in ENGINES}
    assert [told[name]["CUDA_VISIBLE_DEVICES"] for name in ENGINES] == ["0,1", "2,3"]
    assert {told[name]["SHOAL_ENGINE_PROFILE"] for name in ENGINES} == {"/profiles/own.yaml"}
