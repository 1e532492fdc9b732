"""GET /v1/models and /v1/models/{id}: what decode workers offer now, as presence tells it."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from shoal_contracts.errors import BadRequest
from shoal_contracts.ids import new_request_id
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.ports import DecodeFleet
from shoal_gateway.request import ServedModel


class Models:
    """OpenAI's model objects. ``created`` is the start of this gateway: nothing knows when a model was made."""

    def __init__(self, decode: DecodeFleet, created_s: int) -> None:
        self._decode = decode
        self._created_s = created_s

    async def list(self, request: Request) -> JSONResponse:
        """Each name once, however many pools serve it."""
        models = {model.name: model for model in self._decode.models()}
        return _respond({"object": "list", "data": [self._describe(models[name]) for name in sorted(models)]})

    async def get(self, request: Request) -> JSONResponse:
        name = request.path_params["name"]
        for model in self._decode.models():
            if model.name == name:
                return _respond(self._describe(model))
        raise BadRequest(pb.MODEL_NOT_FOUND, f"The model '{name}' does not exist or is not served now.", param="model")

    def _describe(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "shoal",
            "max_model_len": model.max_context_tokens,
        }


def _respond(content: dict[str, Any]) -> JSONResponse:
    return JSONResponse(content, headers={"x-request-id": new_request_id()})
