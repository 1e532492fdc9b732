"""A profile: vLLM's own arguments from YAML files, for what a machine or an endpoint needs and Shoal has no word for.

Names are those of vLLM's command line. Names at the top are for every worker, the sections ``prefill`` and ``decode``
for that role, ``shoal`` for the one choice that is ours to translate. Within a file the section wins, and later files
win over earlier. What Shoal itself sets is refused with the setting to use instead; whether the rest is known and of
the right type is judged by vLLM's parser (``arguments``).
docs/decisions/0028-a-profile-is-vllms-own-arguments.md
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from shoal_engine.api import EngineFailed
from shoal_engine.settings import EngineRole

OURS = "shoal"
NIXL = "nixl"
_ROLES = tuple(role.value for role in EngineRole)

_STORE = "Shoal sets it for its store"
_SERVES = "Shoal serves clients itself"
_OWNED = {
    "block-size": "set SHOAL_ENGINE_BLOCK_TOKENS, which the store must share",
    "disable-log-stats": _SERVES,
    "dtype": "set SHOAL_ENGINE_DTYPE",
    "enable-log-requests": _SERVES,
    "enable-prefix-caching": _STORE,
    "kv-events-config": _STORE,
    "kv-offloading-backend": _STORE,
    "kv-offloading-size": _STORE,
    "kv-transfer-config": f"Shoal builds it; for NIXL beside the store write `{OURS}: {{{NIXL}: true}}`",
    "model": "set SHOAL_ENGINE_MODEL",
    "revision": "set SHOAL_ENGINE_REVISION",
    "served-model-name": "set SHOAL_ENGINE_SERVED_NAME",
    "skip-tokenizer-init": "the tokenizer service owns text",
    "tokenizer": "the tokenizer service owns text",
    "worker-extension-cls": "Shoal's own extension stands there",
}

# What may differ between workers that share KV: when and where something is computed, never what. A name that does not
# stand here becomes part of the pool. Sizes of parallel groups and the KV dtype reach the pool as vLLM resolved them.
_LEAVES_KV_ALONE = frozenset(
    {
        *("max-num-seqs", "max-num-active-seqs", "max-num-batched-tokens", "max-num-scheduled-tokens"),
        *("max-num-queued-reqs", "max-num-queued-tokens", "scheduling-policy", "enable-chunked-prefill"),
        *("long-prefill-token-threshold", "long-prefill-token-threshold-adaptive", "prefill-schedule-interval"),
        *("scheduler-reserve-full-isl", "watermark", "async-scheduling", "stream-interval", "performance-mode"),
        *("gpu-memory-utilization", "device-memory-utilization", "kv-cache-memory-bytes", "num-gpu-blocks-override"),
        *("prefix-cache-retention-interval", "max-logprobs", "logprobs-mode"),
        *("enforce-eager", "compilation-config", "cudagraph-capture-sizes", "max-cudagraph-capture-size"),
        *("tensor-parallel-size", "pipeline-parallel-size", "decode-context-parallel-size"),
        *("cp-kv-cache-interleave-size", "kv-cache-dtype", "data-parallel-size", "data-parallel-size-local"),
        *("data-parallel-address", "data-parallel-rpc-port", "data-parallel-start-rank", "data-parallel-hybrid-lb"),
        *("data-parallel-backend", "distributed-executor-backend", "numa-bind", "disable-custom-all-reduce"),
        *("enable-expert-parallel", "enable-eplb", "eplb-config", "all2all-backend", "expert-placement-strategy"),
        *("enable-dbo", "enable-ep-weight-filter", "max-parallel-loading-workers"),
    }
)


@dataclass(frozen=True, slots=True)
class Profile:
    """What the files say for one role, merged; empty when there are none."""

    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    has_nixl: bool = False

    @property
    def kv_traits(self) -> str:
        """What of it may change a byte of stored KV; two engines share a pool only when this is equal."""
        traits = {name: value for name, value in self.arguments.items() if name not in _LEAVES_KV_ALONE}
        if self.has_nixl:  # it asks vLLM for another order of heads and tokens
            traits[f"{OURS}.{NIXL}"] = True
        return json.dumps(traits, sort_keys=True) if traits else ""


def read_profile(paths: Iterable[str], role: EngineRole | None) -> Profile:
    """Raises EngineFailed, with the file and what to write instead."""
    merged: dict[str, Any] = {}
    ours: dict[str, bool] = {}
    for path in paths:
        top = _read(Path(path))
        sections = {name: _section(path, top, name) for name in _ROLES}
        ours |= _our_choices(path, top)
        for part in (top, *sections.values()):
            _check_names(path, part)
        merged = _merge(merged, top)
        if role is not None:
            merged = _merge(merged, sections[role.value])
    return Profile(MappingProxyType(merged), has_nixl=ours.get(NIXL, False))


def unknown_name(name: str, known: Sequence[str]) -> str:
    """One sentence with the nearest names."""
    near = difflib.get_close_matches(name, known, n=3)
    hint = f" Did you mean: {', '.join(near)}?" if near else ""
    return f"`{name}` is no argument of this vLLM.{hint}"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise EngineFailed(f"the profile {path} cannot be read: {exc.strerror}; see SHOAL_ENGINE_PROFILE") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise EngineFailed(f"the profile {path} is not YAML: {exc}") from exc
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise EngineFailed(f"the profile {path} must be a mapping of vLLM's argument names to values")
    return content


def _section(path: str, content: dict[str, Any], name: str) -> dict[str, Any]:
    """Takes the section out of ``content``."""
    section = content.pop(name, {})
    if not isinstance(section, dict):
        raise EngineFailed(f"the section `{name}` of the profile {path} must be a mapping")
    return section


def _our_choices(path: str, content: dict[str, Any]) -> dict[str, bool]:
    choices = content.pop(OURS, {})
    if not isinstance(choices, dict) or not set(choices) <= {NIXL} or not isinstance(choices.get(NIXL, False), bool):
        raise EngineFailed(f"the section `{OURS}` of the profile {path} knows only `{NIXL}: true` and `{NIXL}: false`")
    return choices


def _check_names(path: str, content: Mapping[str, Any]) -> None:
    for name, value in content.items():
        if reason := _OWNED.get(name.replace("_", "-")):
            raise EngineFailed(f"the profile {path} must not say `{name}`: {reason}")
        if value is None:
            raise EngineFailed(f"`{name}` in the profile {path} has no value")


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping as a value is merged too, so that one field of it can be changed alone."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
