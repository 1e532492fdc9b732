"""Which folder is served, and that a prepared one is whole or not there."""

import hashlib
import json

import pytest

from shoal_model.__main__ import main
from shoal_model.prepare import (
    SEAL,
    ModelUnavailable,
    PreparedModel,
    convert_once,
    prepare,
    seal,
    seal_mismatch,
    show_served,
)


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
        (lambda f: (f / SEAL).unlink(), f"{SEAL} is missing"),
        (lambda f: (f / SEAL).write_text("["), "its seal is damaged"),
        (lambda f: (f / SEAL).write_text(json.dumps({"recipe": 0})), "it was written by another version"),
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


def test_the_link_leads_to_the_served_model_wherever_the_folder_is_mounted(tmp_path):
    models = tmp_path / "models"
    for name in ("first", "second"):
        (models / name).mkdir(parents=True)
        assert show_served(PreparedModel(models / name, name), models) == models / "served"
    models.rename(tmp_path / "mounted")
    assert (tmp_path / "mounted" / "served").resolve() == tmp_path / "mounted" / "second"
    assert sorted(path.name for path in (tmp_path / "mounted").iterdir()) == ["first", "second", "served"]


def test_the_link_leads_out_to_a_folder_elsewhere(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert show_served(PreparedModel(elsewhere, "elsewhere"), tmp_path / "models").resolve() == elsewhere


def test_alone_it_prepares_what_the_environment_names(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("SHOAL_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("SHOAL_MODEL", str(folder))
    assert main() == 0
    assert "model my-model is in" in capsys.readouterr().out
    assert (tmp_path / "models" / "served" / "config.json").is_file()


def test_alone_it_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SHOAL_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("SHOAL_MODEL", "/no/such/folder")
    assert main() == 1
    assert "no such folder" in capsys.readouterr().out
