"""Responses, the request: what its answer repeats of it, and what the gateway keeps of it."""

from typing import Any

import msgspec

from shoal_tokenizer.codec.api import AnswerShape, RequestNames, Sampling, Storage
from shoal_tokenizer.codec.events.responses_object import Echo, read_echo, response_object
from shoal_tokenizer.codec.requests.responses_body import Request
from shoal_tokenizer.codec.requests.responses_tools import is_idle_search

_encode = msgspec.json.Encoder().encode
_LOST = "The server that generated this response was lost. Ask again."
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def echo_fields(request: Request, body: dict[str, Any], sampling: Sampling) -> bytes:
    """The fields of the Response object that come from the request, as they took effect; a JSON object."""
    text = body.get("text") or {}
    effort = request.reasoning.effort if request.reasoning else None
    return _encode(
        {
            "background": bool(request.background),
            "completed_at": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": effort, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": request.store is not False,
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": [tool for tool in body.get("tools") or () if not is_idle_search(tool)],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "truncation": "disabled",
            "user": request.user,
        }
    )


def storage(request: Request, body: dict[str, Any], shape: AnswerShape, names: RequestNames) -> Storage | None:
    """None: nothing is kept."""
    if request.store is False:
        return None
    echo: Echo = read_echo(shape.echo)
    error = {"code": "server_error", "message": _LOST}
    is_background = bool(request.background)
    return Storage(
        input_items=_encode(_input_items(body.get("input"), names.request_id)),
        is_stored=True,
        is_background=is_background,
        previous_response_id=request.previous_response_id,
        pending_body=response_object(shape, echo, "queued" if is_background else "in_progress", []),
        lost_body=response_object(shape, echo, "failed", [], error=error),
    )


def _input_items(given: Any, request_id: str) -> list[dict[str, Any]]:
    """New input as the API lists it: each item with an id and a state, text of messages in parts."""
    items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given or []
    return [_listed(item, f"{request_id}_in{index}") for index, item in enumerate(items)]


def _listed(item: dict[str, Any], name: str) -> dict[str, Any]:
    listed = {**item, "id": item.get("id") or f"{_PREFIXES[item['type']]}_{name}"}
    listed["status"] = item.get("status") or "completed"
    if item["type"] == "message":
        content = item["content"]
        parts = [_text_part(item["role"], content)] if isinstance(content, str) else content
        listed["content"] = [_shown_part(part) for part in parts]
    return listed


def _shown_part(part: dict[str, Any]) -> dict[str, Any]:
    return {"annotations": [], **part} if part["type"] == "output_text" else part


def _text_part(role: str, text: str) -> dict[str, Any]:
    return {"type": "output_text" if role == "assistant" else "input_text", "text": text}
