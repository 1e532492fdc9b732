"""What the tests of the repository look at: its files, found once."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = "libs/contracts/src/shoal_contracts/v1"
TEXT_SUFFIXES = {".md", ".proto", ".py", ".sh", ".toml", ".txt", ".yml", ".yaml"}
TOP = ("docs", "libs", "services", "tests", ".ci")
SKIPPED = {"__pycache__", "node_modules", "build", "dist"}


@dataclass(frozen=True, slots=True)
class Repository:
    """The files of this checkout, by the rules that apply to them."""

    root: Path

    def _walk(self) -> Iterator[Path]:
        yield from (path for path in self.root.iterdir() if path.is_file())
        for top in TOP:
            for path in sorted((self.root / top).rglob("*")):
                if (
                    path.is_file()
                    and not SKIPPED.intersection(path.parts)
                    and self.name(path)[: len(GENERATED)] != GENERATED
                ):
                    yield path

    def name(self, path: Path) -> str:
        """The path as people write it, from the root."""
        return path.relative_to(self.root).as_posix()

    def shipped(self) -> list[Path]:
        """Python of our packages: what the budgets and the vocabulary apply to."""
        return [path for path in self._walk() if path.suffix == ".py" and "src" in path.relative_to(self.root).parts]

    def tests(self) -> list[Path]:
        return [path for path in self._walk() if path.suffix == ".py" and "tests" in path.relative_to(self.root).parts]

    def markdown(self) -> list[Path]:
        return [path for path in self._walk() if path.suffix == ".md"]

    def texts(self) -> list[Path]:
        """Everything that people wrote and may cite a document in."""
        return [
            path for path in self._walk() if path.suffix in TEXT_SUFFIXES or path.name in {"Makefile", "Dockerfile"}
        ]

    def services(self) -> list[str]:
        return sorted(path.parent.name for path in (self.root / "services").glob("*/pyproject.toml"))


@pytest.fixture(scope="session")
def repository() -> Repository:
    return Repository(ROOT)
