"""Reads a profile with vLLM's own argument parser, so that names, types and choices are vLLM's.

vLLM's parser ends the process on a mistake; here the sentence it would have printed becomes an EngineFailed.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from shoal_engine.api import EngineFailed
from shoal_engine.vllm.profile import unknown_name


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise EngineFailed(f"vLLM refuses the profile: {message}")


def engine_arguments(profile: Mapping[str, Any]) -> dict[str, Any]:
    """By field of AsyncEngineArgs, only what the profile names. Raises EngineFailed."""
    if not profile:
        return {}
    parser = AsyncEngineArgs.add_cli_args(_Parser(add_help=False, allow_abbrev=False))
    assert isinstance(parser, _Parser)
    actions = {
        option.removeprefix("--"): action
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    known = {field.name for field in fields(AsyncEngineArgs)}
    names = sorted(name for name, action in actions.items() if action.dest in known and not name.startswith("no-"))
    words: list[str] = []
    for name, value in profile.items():
        if name not in names:
            raise EngineFailed(unknown_name(name, names))
        words += _words(name, value, actions[name])
    parsed = vars(parser.parse_args(words))
    return {actions[name].dest: parsed[actions[name].dest] for name in profile}


def _words(name: str, value: Any, action: argparse.Action) -> list[str]:
    """As one would type it."""
    if action.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise EngineFailed(f"`{name}` in the profile must be true or false, not {value!r}")
        if value:
            return [f"--{name}"]
        return [f"--no-{name}"] if f"--no-{name}" in action.option_strings else []
    if isinstance(value, bool):
        raise EngineFailed(f"`{name}` in the profile takes a value, not {str(value).lower()}")
    if isinstance(value, dict):
        return [f"--{name}", json.dumps(value)]
    values = value if isinstance(value, list) else [value]
    return [f"--{name}", *map(str, values)]
