"""The management API as an ASGI app: the routes of `endpoints`, and an error body for each exception."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fleetstart.runtime.contract.errors import FleetError, NotFound

from ..http.asgi import error_headers, error_json
from ..http.request_context import REQUEST
from ..state.redis_client import REDIS_ERRORS, unavailable
from .endpoints import routes_of

log = logging.getLogger(__name__)


def build_app(apis: Iterable[object]) -> Starlette:
    """`apis`: one instance of each class in the table of endpoints."""
    return Starlette(
        routes=routes_of(apis),
        exception_handlers={
            FleetError: _fleet_error,
            HTTPException: _http_error,
            **dict.fromkeys(REDIS_ERRORS, _redis_error),
            Exception: _unforeseen,
        },
    )


async def _fleet_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, FleetError)
    request_id = REQUEST.get()
    headers = {name.decode(): value.decode() for name, value in error_headers(error, request_id)}
    return Response(error_json(error, request_id), status_code=error.status, headers=headers)


async def _unforeseen(request: Request, error: Exception) -> Response:
    log.error("unhandled exception in a request", extra={"path": request.url.path}, exc_info=error)
    return await _fleet_error(request, FleetError(f"{type(error).__name__} in the controller: see its log"))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    shown = NotFound(f"{request.method} {request.url.path} does not exist", hint="/openapi.json lists all endpoints")
    response = await _fleet_error(request, shown)
    response.status_code = error.status_code
    return response


async def _redis_error(request: Request, error: Exception) -> Response:
    return await _fleet_error(request, unavailable(error, "so this cannot be read or changed"))
