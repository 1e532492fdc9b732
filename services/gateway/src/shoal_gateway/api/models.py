"""GET /v1/models and /v1/models/{id}: what decode workers offer now, as presence tells it.

In Anthropic's shape for clients that name ``anthropic-version``, in OpenAI's for everybody else.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from shoal_contracts.errors import BadRequest
from shoal_contracts.ids import new_request_id
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.api.query import read_limit
from shoal_gateway.error_shapes import id_headers
from shoal_gateway.ports import DecodeFleet
from shoal_gateway.request import Api, ServedModel

PAGE = 20
MAX_PAGE = 1000


def speaks_anthropic(request: Request) -> bool:
    """Anthropic's clients name a version with every request."""
    return "anthropic-version" in request.headers


class Models:
    """The time of a model is the start of this gateway: nothing knows when it was made."""

    def __init__(self, decode: DecodeFleet, created_s: int) -> None:
        self._decode = decode
        self._created_s = created_s

    async def list(self, request: Request) -> JSONResponse:
        """Each name once, however many pools serve it."""
        models = {model.name: model for model in self._decode.models()}
        served = [models[name] for name in sorted(models)]
        if speaks_anthropic(request):
            return _respond(Api.MESSAGES, self._page(served, request))
        data = [self._describe(model) for model in served]
        return _respond(Api.CHAT_COMPLETIONS, {"object": "list", "data": data})

    async def get(self, request: Request) -> JSONResponse:
        name = request.path_params["name"]
        for model in self._decode.models():
            if model.name == name and speaks_anthropic(request):
                return _respond(Api.MESSAGES, self._describe_to_anthropic(model))
            if model.name == name:
                return _respond(Api.CHAT_COMPLETIONS, self._describe(model))
        raise BadRequest(pb.MODEL_NOT_FOUND, f"The model '{name}' does not exist or is not served now.", param="model")

    def _page(self, served: Sequence[ServedModel], request: Request) -> dict[str, Any]:
        query = request.query_params
        limit = read_limit(query.get("limit"), PAGE, MAX_PAGE)
        rest = list(served)
        if (after := query.get("after_id")) is not None:
            rest = [model for model in rest if model.name > after]
        if (before := query.get("before_id")) is not None:
            rest = [model for model in rest if model.name < before]
        page = rest[-limit:] if before is not None else rest[:limit]
        return {
            "data": [self._describe_to_anthropic(model) for model in page],
            "first_id": page[0].name if page else None,
            "last_id": page[-1].name if page else None,
            "has_more": len(rest) > len(page),
        }

    def _describe_to_anthropic(self, model: ServedModel) -> dict[str, Any]:
        return {
            "type": "model",
            "id": model.name,
            "display_name": model.name,
            "created_at": datetime.fromtimestamp(self._created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": model.max_context_tokens,
            "max_tokens": model.max_context_tokens,
        }

    def _describe(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "shoal",
            "max_model_len": model.max_context_tokens,
        }


def _respond(api: Api, content: dict[str, Any]) -> JSONResponse:
    headers = {name.decode(): value.decode() for name, value in id_headers(api, new_request_id())}
    return JSONResponse(content, headers=headers)
