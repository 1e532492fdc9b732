"""One interface to an inference engine, two implementations; ``build_engine`` picks one.

Importing this package imports neither vLLM nor torch: an implementation is loaded when it is built.
"""

from shoal_engine.api import (
    ConstraintRefused,
    Engine,
    EngineDescription,
    EngineFailed,
    EngineLoad,
    EngineRequest,
    FinishReason,
    Item,
    Prefetched,
    PrefillResult,
    RequestRefused,
    Sampling,
    StateGroup,
    StateKind,
    Step,
    TokenLogprobs,
)
from shoal_engine.settings import EngineKind, EngineRole, EngineSettings

__all__ = [
    "ConstraintRefused",
    "Engine",
    "EngineDescription",
    "EngineFailed",
    "EngineKind",
    "EngineLoad",
    "EngineRequest",
    "EngineRole",
    "EngineSettings",
    "FinishReason",
    "Item",
    "Prefetched",
    "PrefillResult",
    "RequestRefused",
    "Sampling",
    "StateGroup",
    "StateKind",
    "Step",
    "TokenLogprobs",
    "build_engine",
]


def build_engine(settings: EngineSettings, role: EngineRole | None = None) -> Engine:
    """An engine that is not started yet; ``role`` picks its section of a profile.

    Raises EngineFailed when its packages are not installed.
    """
    if settings.kind is EngineKind.SCRIPTED:
        # Here, not above: the scripted engine reads its own settings and needs nothing of vLLM, and the reverse.
        from shoal_engine.scripted import build_scripted_engine

        return build_scripted_engine(settings)
    try:
        from shoal_engine.vllm.engine import VllmEngine
    except ImportError as exc:
        raise EngineFailed(f"vLLM is not installed in this environment ({exc.name} is missing)") from exc
    return VllmEngine(settings, role=role)
