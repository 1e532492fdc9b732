"""Whether the files of the model are whole, and how much memory its weights take. Blocks while it reads.

The prepared default has a seal, which names the digest of every file. Other folders have none: there the header of
each safetensors file says how long the file must be, which finds what was cut off or never came.
"""

import importlib.util
import json
from pathlib import Path

from shoal_local.doctor.findings import Finding, ok, wrong
from shoal_local.wording import counted, size
from shoal_model.prepare import DEFAULT_MODEL, DEFAULT_PACKAGE, SEAL, seal_mismatch

NAME = "model"
INDEX = "model.safetensors.index.json"
HEADER_BYTES = 100 * 2**20  # longer is no header
AGAIN = "Fetch it again, or name another folder in SHOAL_MODEL."


def folder_of(model: str, models_dir: Path) -> Path:
    """Where the files of ``SHOAL_MODEL`` are, or will be once it is prepared."""
    if not model:
        return models_dir / DEFAULT_MODEL
    folder = Path(model).expanduser()
    return folder if folder.is_dir() else models_dir / model.replace("/", "--")


def weights_bytes(folder: Path) -> int:
    """Of the files that hold weights; 0 when there are none yet."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def has_windows(folder: Path) -> bool:
    """Whether some layers have a sliding window; False while nobody knows."""
    try:
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = told.get("text_config", told)
        if layer_types := config.get("layer_types"):
            return "sliding_attention" in layer_types
        return bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def check_model(model: str, models_dir: Path) -> Finding:
    """Of what the next start loads."""
    folder = folder_of(model, models_dir)
    if not folder.is_dir():
        return _check_absent(model, folder)
    if (folder / SEAL).is_file():
        if mismatch := seal_mismatch(folder):
            found = f"the prepared model in {folder} is not what it was: {mismatch}"
            return wrong(NAME, found, f"Run `rm -r '{folder}'` and start again: it is prepared anew, in some seconds.")
        return ok(NAME, f"{folder.name} is whole, every file as it was sealed")
    if fault := _fault_of(folder):
        return wrong(NAME, f"{folder}: {fault}", AGAIN)
    return ok(NAME, f"{folder.name}: {size(weights_bytes(folder))} of weights, no file cut off")


def _check_absent(model: str, folder: Path) -> Finding:
    if not model:
        if importlib.util.find_spec(DEFAULT_PACKAGE) is None:
            return wrong(NAME, "the default model is not installed", "Run `make setup`, or name one in SHOAL_MODEL.")
        return ok(NAME, f"{folder.name} is not prepared yet; the next start does it, in some seconds")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        found = f"SHOAL_MODEL={model} is no folder here, and no hub id like owner/name"
        return wrong(NAME, found, "Name a folder with config.json and safetensors, or a hub id.")
    return ok(NAME, f"{model} is not here yet; the next start downloads it")


def _fault_of(folder: Path) -> str | None:
    if not (folder / "config.json").is_file():
        return "config.json is missing"
    present = {path.name: path for path in folder.glob("*.safetensors")}
    try:
        named = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        named = set()
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{INDEX} cannot be read"
    if lacking := sorted(named - present.keys()):
        return f"{counted(len(lacking), 'file')} of weights missing, the first is {lacking[0]}"
    if not present:
        return "there is no safetensors file in it"
    for name in sorted(present):
        if fault := cut_off(present[name]):
            return f"{name} {fault}"
    return None


def cut_off(path: Path) -> str | None:
    """What is wrong with the length of a safetensors file: a length, a JSON header with offsets, then the tensors."""
    length = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= min(HEADER_BYTES, length - 8):
            return "is no safetensors file, or is cut off in its header"
        try:
            header = json.loads(file.read(header_bytes))
            end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return "has a damaged header"
    wanted = 8 + header_bytes + end
    return None if length == wanted else f"has {length:,} bytes where its header says {wanted:,}"
