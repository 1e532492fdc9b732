"""Paths → endpoints. Everything that no endpoint answers becomes an error in the shape of the path's API here."""

from collections.abc import Callable, Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal_contracts.errors import BadRequest, Bug, ShoalError
from shoal_contracts.ids import new_request_id
from shoal_contracts.v1 import common_pb2 as pb
from shoal_gateway.api.endpoint import Endpoint
from shoal_gateway.api.models import Models, speaks_anthropic
from shoal_gateway.api.ops import Ops
from shoal_gateway.api.responses import StoredResponses
from shoal_gateway.error_shapes import api_of, error_response, id_headers
from shoal_runtime.health import AsgiApp
from shoal_runtime.logs import get_logger

log = get_logger(__name__)

NOT_ALLOWED = 405


def create_app(endpoints: Sequence[Endpoint], responses: StoredResponses, models: Models, ops: Ops) -> AsgiApp:
    """The public application."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    app.router.routes = [
        *(Route(endpoint.path, endpoint, methods=["POST"]) for endpoint in endpoints),
        Route("/v1/responses/{id}", responses.get, methods=["GET"]),
        Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", responses.input_items, methods=["GET"]),
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{name:path}", models.get, methods=["GET"]),
        Route("/healthz", ops.healthz, methods=["GET"]),
        Route("/readyz", ops.readyz, methods=["GET"]),
        Route("/metrics", ops.metrics, methods=["GET"]),
    ]
    handlers: dict[type[Exception], Callable[[Request, Exception], Response]] = {
        HTTPException: _on_http_exception,
        ShoalError: _on_shoal_error,
        Exception: _on_exception,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    return app


def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        response = _respond(request, BadRequest(pb.METHOD_NOT_ALLOWED, f"{where} is not allowed; use {allowed}"))
        response.headers["allow"] = allowed
        return response
    return _respond(request, BadRequest(pb.NOT_FOUND, f"{where} does not exist here; the API is under /v1"))


def _on_shoal_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ShoalError)
    return _respond(request, error)


def _on_exception(request: Request, error: Exception) -> Response:
    log.error("request.crashed", exc_info=error)
    return _respond(request, Bug(pb.BUG, "an internal error; it was logged"))


def _respond(request: Request, error: ShoalError) -> Response:
    api, request_id = api_of(request.url.path, is_anthropic=speaks_anthropic(request)), new_request_id()
    status, body, headers = error_response(error, api, request_id)
    response = Response(body, status_code=status, media_type="application/json")
    for name, value in [*headers, *id_headers(api, request_id)]:
        response.headers[name.decode()] = value.decode()
    return response
