"""A model is whole, or the file that is not is named."""

import json

import pytest

from shoal_local.doctor.findings import Verdict
from shoal_local.doctor.model_files import check_model, cut_off, folder_of, has_windows, weights_bytes
from shoal_model.prepare import seal


def write_weights(path, length=64):
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "F32", "shape": [16], "data_offsets": [0, length]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(length))


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "mine"
    made.mkdir()
    (made / "config.json").write_text("{}")
    write_weights(made / "model.safetensors")
    return made


def test_a_whole_folder_is_right(folder, tmp_path):
    assert check_model(str(folder), tmp_path).verdict is Verdict.OK
    assert weights_bytes(folder) == (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("kept", [4, 40, -1])
def test_a_file_that_was_cut_off_is_named(folder, tmp_path, kept):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:kept])
    finding = check_model(str(folder), tmp_path)
    assert finding.verdict is Verdict.WRONG
    assert "model.safetensors" in finding.found
    assert "SHOAL_MODEL" in finding.advice


def test_a_header_that_is_none_is_told(folder):
    damaged = folder / "model.safetensors"
    damaged.write_bytes((10).to_bytes(8, "little") + b"not json!!" + bytes(64))
    assert cut_off(damaged) == "has a damaged header"


def test_files_that_the_index_names_must_be_there(folder, tmp_path):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    assert "1 file of weights missing, the first is model-2.safetensors" in check_model(str(folder), tmp_path).found
    index.write_text("[]")
    assert "cannot be read" in check_model(str(folder), tmp_path).found


def test_a_folder_without_config_or_weights_is_told(folder, tmp_path):
    (folder / "config.json").unlink()
    assert "config.json is missing" in check_model(str(folder), tmp_path).found
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").unlink()
    assert "no safetensors file" in check_model(str(folder), tmp_path).found


def test_a_sealed_folder_is_compared_byte_for_byte(folder, tmp_path):
    seal(folder)
    assert "as it was sealed" in check_model(str(folder), tmp_path).found
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    finding = check_model(str(folder), tmp_path)
    assert finding.verdict is Verdict.WRONG
    assert "model.safetensors has changed" in finding.found


def test_what_is_no_model_is_told_and_what_is_not_here_yet_is_fine(tmp_path):
    assert check_model("./nowhere", tmp_path).verdict is Verdict.WRONG
    assert check_model("word", tmp_path).verdict is Verdict.WRONG
    finding = check_model("owner/name", tmp_path)
    assert (finding.verdict, "downloads it" in finding.found) == (Verdict.OK, True)
    assert folder_of("owner/name", tmp_path) == tmp_path / "owner--name"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, False),
        ({"sliding_window": None}, False),
        ({"sliding_window": 512}, True),
        ({"sliding_window": 512, "use_sliding_window": False}, False),
        ({"layer_types": ["full_attention"], "sliding_window": 512}, False),
        ({"text_config": {"layer_types": ["full_attention", "sliding_attention"]}}, True),
    ],
)
def test_windows_are_seen_in_the_config(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert has_windows(tmp_path) is expected
