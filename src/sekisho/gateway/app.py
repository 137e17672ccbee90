"""The gateway as an ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sekisho.gateway.access import AccessLog, record_of
from sekisho.gateway.api import Api
from sekisho.gateway.backend import Backend
from sekisho.gateway.errors import ApiError
from sekisho.gateway.model import ServedModel
from sekisho.gateway.store import TenantStore

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def create_app(backend: Backend, model: ServedModel, store: TenantStore) -> Starlette:
    """The OpenAI API over ``backend``. The caller opens and closes all three arguments."""
    api = Api(backend, model, store)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        api.close()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{model:path}", api.model),
            Route("/health", api.liveness),
            Route("/health/liveness", api.liveness),
            Route("/health/readiness", api.readiness),
            Route("/health/capacity", api.capacity),
        ],
        middleware=[Middleware(AccessLog)],
        exception_handlers={ApiError: _refused, HTTPException: _refused_by_router},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


async def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    record = record_of(request.scope)
    record.failed(error)
    return error.response(record.request_id)


async def _refused_by_router(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    code = _HTTP_CODES.get(error.status_code, "invalid_request")
    response = await _refused(request, ApiError(error.status_code, code, error.detail))
    response.headers.update(error.headers or {})
    return response
