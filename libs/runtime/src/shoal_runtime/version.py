"""Which code a process runs, as far as all services have it in common: contracts and runtime.

The version of our packages is the same for every state of the sources, so a digest of the code itself stands behind
it. Two instances that differ in it were built from different sources: they may not understand each other.
"""

import hashlib
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path

import shoal_contracts
import shoal_runtime

DIGEST_CHARACTERS = 10


@cache
def version() -> str:
    """Such as ``0.0.0+src.4f2d19c0ab``; read from the disk once, some milliseconds."""
    folders = (Path(package.__path__[0]) for package in (shoal_contracts, shoal_runtime))
    return f"{version_of('shoal-runtime')}.{digest_of(*folders)}"


def digest_of(*folders: Path) -> str:
    """Of every module below ``folders``, its name and its text."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:DIGEST_CHARACTERS]
