"""Real containers from this checkout's docker-compose.yml. `make test-compose` builds the images and runs these.

Each system has a project name and a port of its own, and leaves nothing behind.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def scripted_file() -> Path:
    """Laid over docker-compose.yml: the same system without a model."""
    return Path(__file__).parent / "scripted.yml"
