"""Which folder is served, and that a prepared one is whole or not there."""

import hashlib
import json

import pytest

from shoal_local import model
from shoal_local.model import ModelUnavailable, convert_once, prepare, seal, seal_mismatch


@pytest.fixture
def said():
    return []


@pytest.fixture
def sealed(tmp_path):
    folder = tmp_path / "sealed"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    seal(folder)
    return folder


def test_a_local_folder_is_served_as_it_is(tmp_path, said):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    prepared = prepare(str(folder), tmp_path / "models", said.append)
    assert (prepared.folder, prepared.served_name) == (folder.resolve(), "my-model")
    assert said == []


def test_a_folder_without_config_is_told(tmp_path, said):
    with pytest.raises(ModelUnavailable, match=r"no config\.json"):
        prepare(str(tmp_path), tmp_path / "models", said.append)


@pytest.mark.parametrize("name", ["/no/such/folder", "./here", "~/there", "just-a-name", "a/b/c"])
def test_what_is_neither_folder_nor_hub_id_is_told(name, tmp_path, said):
    with pytest.raises(ModelUnavailable, match="no such folder"):
        prepare(name, tmp_path / "models", said.append)


def test_a_downloaded_hub_model_is_used_without_asking_again(tmp_path, said):
    (tmp_path / "models" / "owner--name").mkdir(parents=True)
    prepared = prepare("owner/name", tmp_path / "models", said.append)
    assert prepared.folder == tmp_path / "models" / "owner--name"
    assert prepared.served_name == "owner/name"
    assert said == []


def test_an_untouched_folder_fits_its_seal(sealed):
    assert seal_mismatch(sealed) is None


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda f: (f / "model.safetensors").write_bytes(b"weighty"), "model.safetensors has changed"),
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / model.SEAL).unlink(), f"{model.SEAL} is missing"),
        (lambda f: (f / model.SEAL).write_text("["), "its seal is damaged"),
        (lambda f: (f / model.SEAL).write_text(json.dumps({"recipe": 0})), "it was written by another version"),
    ],
)
def test_what_happened_to_a_folder_is_told(sealed, harm, reason):
    harm(sealed)
    assert seal_mismatch(sealed) == reason


def test_damaged_weights_leave_nothing_behind(tmp_path, said):
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"not what was packaged")
    target = tmp_path / "models" / "tiny"
    with pytest.raises(ModelUnavailable, match="damaged"):
        convert_once(source, hashlib.sha256(b"what was packaged").hexdigest(), target, said.append)
    assert [path.name for path in target.parent.iterdir()] == [".tiny.lock"]


def test_a_sealed_folder_is_not_prepared_again(sealed, said):
    convert_once(sealed / "no-such-file", "", sealed, said.append)
    assert said == []
