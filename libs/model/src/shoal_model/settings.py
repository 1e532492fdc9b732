"""Which model is prepared, and where: ``SHOAL_MODEL`` and ``SHOAL_MODELS_DIR``, the same for `shoal up` and alone."""

import os
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from shoal_runtime.settings import EnvironmentSettings


def _models_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "models"


class ModelSettings(EnvironmentSettings):
    """Each is set by ``SHOAL_<FIELD>``."""

    models_dir: Path = Field(default_factory=_models_dir, description="Where prepared and downloaded models lie.")
    model: str = Field("", description="A model folder or hub id that vLLM serves; empty takes the packaged model.")

    shared_fields: ClassVar[frozenset[str]] = frozenset()


ModelSettings.shared_fields = frozenset(ModelSettings.model_fields)
