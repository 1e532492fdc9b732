"""How an operator's variables become engine settings."""

import sys

import pytest
from pydantic import ValidationError

from shoal_engine import EngineFailed, EngineKind, EngineSettings, build_engine


def test_reads_its_own_variables_and_keeps_defaults() -> None:
    settings = EngineSettings.load(
        environ={"SHOAL_ENGINE_MODEL": "/models/Small-1", "SHOAL_ENGINE_KIND": "scripted", "SHOAL_NATS_URL": "nats://x"}
    )
    assert settings.kind is EngineKind.SCRIPTED
    assert settings.block_tokens == 128
    assert settings.max_context_tokens is None
    assert settings.shown_name == "Small-1"


def test_unknown_variable_stops_the_start_and_names_the_nearest() -> None:
    with pytest.raises(SystemExit, match="SHOAL_ENGINE_MODEL"):
        EngineSettings.load(environ={"SHOAL_ENGINE_MODL": "/models/small"})


@pytest.mark.parametrize("block_tokens", [0, 100, 8192])
def test_block_size_that_no_engine_can_hold_is_refused(block_tokens: int) -> None:
    with pytest.raises(ValidationError, match="block_tokens"):
        EngineSettings(model="m", block_tokens=block_tokens)


def test_served_name_wins_over_the_path() -> None:
    assert EngineSettings(model="/models/a", served_name="b").shown_name == "b"


def test_building_an_engine_imports_no_vllm() -> None:
    before = "vllm" in sys.modules
    engine = build_engine(EngineSettings(model="/models/absent"))
    assert ("vllm" in sys.modules) == before
    with pytest.raises(EngineFailed):
        _ = engine.description
