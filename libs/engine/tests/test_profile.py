"""What a profile may say, what wins, and which part of it keeps engines from sharing KV."""

from pathlib import Path
from textwrap import dedent

import pytest

from shoal_engine import EngineFailed, EngineRole, EngineSettings
from shoal_engine.vllm.profile import Profile, read_profile


@pytest.fixture
def write(tmp_path: Path) -> "Write":
    return Write(tmp_path)


class Write:
    """Writes YAML; returns the path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, text: str, name: str = "profile.yaml") -> str:
        (self._folder / name).write_text(dedent(text))
        return str(self._folder / name)


def read(*paths: str, role: EngineRole | None = EngineRole.DECODE) -> dict[str, object]:
    return dict(read_profile(paths, role).arguments)


def test_no_files_say_nothing() -> None:
    assert read_profile((), EngineRole.PREFILL) == Profile()
    assert Profile().kv_traits == ""


def test_each_role_gets_its_own_section(write: Write) -> None:
    path = write(
        """
        max-num-seqs: 16
        stream-interval: 2
        prefill: {max-num-seqs: 8}
        decode: {max-num-seqs: 64}
        """
    )
    assert read(path, role=EngineRole.PREFILL) == {"max-num-seqs": 8, "stream-interval": 2}
    assert read(path, role=EngineRole.DECODE) == {"max-num-seqs": 64, "stream-interval": 2}
    assert read(path, role=None) == {"max-num-seqs": 16, "stream-interval": 2}


def test_later_file_wins_also_over_the_section_of_an_earlier_one(write: Write) -> None:
    model = write("{max-num-seqs: 16, decode: {max-num-seqs: 64, watermark: 0.1}}", "model.yaml")
    endpoint = write("max-num-seqs: 4", "endpoint.yaml")
    assert read(model, endpoint) == {"max-num-seqs": 4, "watermark": 0.1}
    assert read(endpoint, model) == {"max-num-seqs": 64, "watermark": 0.1}


def test_one_field_of_a_nested_value_is_changed_alone(write: Write) -> None:
    path = write("{eplb-config: {window_size: 1000}, decode: {eplb-config: {num_redundant_experts: 64}}}")
    assert read(path) == {"eplb-config": {"window_size": 1000, "num_redundant_experts": 64}}


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("block-size: 64", "SHOAL_ENGINE_BLOCK_TOKENS"),
        ("block_size: 64", "SHOAL_ENGINE_BLOCK_TOKENS"),
        ("decode: {model: other}", "SHOAL_ENGINE_MODEL"),
        ("kv-transfer-config: {kv_connector: NixlConnector}", "shoal: {nixl: true}"),
        ("prefill: {enable-prefix-caching: false}", "for its store"),
    ],
)
def test_what_shoal_owns_is_refused_with_what_to_do_instead(write: Write, said: str, hint: str) -> None:
    with pytest.raises(EngineFailed, match=r"profile\.yaml must not say") as refusal:
        read(write(said))
    assert hint in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is not YAML"),
        ("- max-num-seqs", "must be a mapping"),
        ("7: 8", "must be a mapping"),
        ("", "must be a mapping"),
        ("decode: 7", "the section `decode`"),
        ("watermark:", "`watermark` .* has no value"),
        ("shoal: {nixl: 1}", "knows only"),
        ("shoal: {pool: mine}", "knows only"),
    ],
)
def test_file_that_is_no_profile_is_refused(write: Write, text: str, sentence: str) -> None:
    with pytest.raises(EngineFailed, match=sentence):
        read(write(text))


def test_missing_file_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"absent\.yaml cannot be read: No such file.*SHOAL_ENGINE_PROFILE"):
        read(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("said", "is_a_trait"),
    [
        ("max-num-seqs: 4", False),
        ("tensor-parallel-size: 4", False),  # reaches the pool as vLLM resolved it
        ("speculative-config: {method: dspark}", True),
        ("swa-bounded-replay: false", True),
        ("hf-overrides: {rope_theta: 1}", True),
        ("a-name-of-a-later-vllm: 1", True),
        ("shoal: {nixl: true}", True),
        ("shoal: {nixl: false}", False),
    ],
)
def test_what_may_change_stored_kv_is_a_trait(write: Write, said: str, is_a_trait: bool) -> None:
    assert bool(read_profile([write(said)], None).kv_traits) == is_a_trait


def test_traits_do_not_depend_on_the_order_of_names(write: Write) -> None:
    one = read_profile([write("{quantization: fp8, mamba-cache-dtype: float32}", "one.yaml")], None)
    two = read_profile([write("{mamba-cache-dtype: float32, quantization: fp8}", "two.yaml")], None)
    assert one.kv_traits == two.kv_traits


def test_setting_takes_several_files() -> None:
    environ = {"SHOAL_ENGINE_MODEL": "m", "SHOAL_ENGINE_PROFILE": "/p/model.yaml, /p/endpoint.yaml"}
    assert EngineSettings.load(environ=environ).profile == ("/p/model.yaml", "/p/endpoint.yaml")
