"""Tool calls and their results in a conversation: read arguments, pair results with calls.

Every family's grammar puts the results of a turn behind its calls, in their order; a conversation in which they do not
match would make the model read a result as another call's. So it is refused, for all three APIs by the same words.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from shoal_tokenizer.codec.arguments import ArgumentsGuard
from shoal_tokenizer.codec.requests.fields import invalid

_decode = msgspec.json.Decoder().decode


MENDED_NOTE = "arguments of an earlier tool call were no JSON object; what the model wrote is shown in a string of one"


def read_arguments(text: str) -> tuple[dict[str, Any], bool]:
    """The arguments of a call in the history, and whether they had to be made a JSON object. No text at all is ``{}``.

    An answer that was cut inside of a call leaves such; agents keep it in their history.
    """
    if not text.strip():
        return {}, False
    arguments = _object(text)
    if arguments is not None:
        return arguments, False
    guard = ArgumentsGuard()
    arguments = _object(guard.push(text) + guard.close())
    return {"": text} if arguments is None else arguments, True


def _object(text: str) -> dict[str, Any] | None:
    try:
        arguments = _decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def pair_results(messages: list[dict[str, Any]], where: Callable[[int], str]) -> list[dict[str, Any]]:
    """The conversation with each run of tool messages in the order of the calls that they answer, named after them.

    ``where(index)`` is the place of ``messages[index]`` in the body, for errors. Raises BadRequest for a result without
    a call, a second result of one call, a call without a result, and two calls of one id.
    """
    paired: list[dict[str, Any]] = []
    open_calls: dict[str, str] = {}
    results: dict[str, dict[str, Any]] = {}
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            if call_id not in open_calls or call_id in results:
                raise invalid(f"The tool result for '{call_id[:64]}' answers no open tool call.", where(index))
            results[call_id] = {**message, "name": open_calls[call_id]}
            continue
        paired += _in_order(open_calls, results, where(index))
        open_calls, results = _open_calls(message, where(index)), {}
        paired.append(message)
    return paired + _in_order(open_calls, results, where(len(messages) - 1) if messages else "")


def _in_order(calls: dict[str, str], results: dict[str, dict[str, Any]], param: str) -> list[dict[str, Any]]:
    missing = [call_id for call_id in calls if call_id not in results]
    if missing:
        raise invalid(f"The tool call '{missing[0][:64]}' has no result before the next message.", param)
    return [results[call_id] for call_id in calls]


def _open_calls(message: dict[str, Any], param: str) -> dict[str, str]:
    calls: dict[str, str] = {}
    for call in message.get("tool_calls") or ():
        if call["id"] in calls:
            raise invalid(f"Two tool calls have the id '{call['id'][:64]}'.", param)
        calls[call["id"]] = call["function"]["name"]
    return calls
