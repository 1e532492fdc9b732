"""What the fake tokenizer says of stored responses: items are ``{"id", "text"}``, answers the tokens as letters."""

import json
from collections.abc import Sequence
from typing import Any

from shoal_contracts.v1 import common_pb2, tokenizer_pb2

STATUSES = {
    common_pb2.STOP: "completed",
    common_pb2.LENGTH: "incomplete",
    common_pb2.CANCEL: "cancelled",
    common_pb2.FAILURE: "failed",
}


def prompt_text(request: tokenizer_pb2.EncodeRequest, body: dict[str, Any]) -> str:
    """All that a body says, after what its history says."""
    earlier = "".join(item["text"] for item in json.loads(request.history or b"[]"))
    messages = "".join(message["content"] for message in body.get("messages", ()))
    return f"{earlier}{messages}{body.get('input', '')}{body.get('prompt', '')}"


def storage(request: tokenizer_pb2.EncodeRequest, body: dict[str, Any]) -> tokenizer_pb2.Storage | None:
    """None: nothing is kept."""
    if request.api != tokenizer_pb2.RESPONSES or not body.get("store", True):
        return None
    is_background = body.get("background", False)
    return tokenizer_pb2.Storage(
        input_items=json.dumps([{"id": f"in_{request.request_id}", "text": body.get("input", "")}]).encode(),
        is_stored=True,
        is_background=is_background,
        previous_response_id=body.get("previous_response_id"),
        pending_body=response(request.request_id, "queued" if is_background else "in_progress", []),
        lost_body=response(request.request_id, "failed", []),
    )


def response(request_id: str, status: str, token_ids: Sequence[int]) -> bytes:
    """The response object."""
    output = [{"id": f"out_{request_id}", "text": "".join(map(chr, token_ids))}] if token_ids else []
    return json.dumps({"id": f"resp_{request_id}", "status": status, "output": output}).encode()
