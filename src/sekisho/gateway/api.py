"""The endpoints."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sekisho.gateway.access import record_of
from sekisho.gateway.answers import ChatFormat, CompletionFormat, Format, Json
from sekisho.gateway.auth import authenticate
from sekisho.gateway.backend import Backend
from sekisho.gateway.body import read_body
from sekisho.gateway.errors import TOLD, ApiError, clip
from sekisho.gateway.generation import Generation
from sekisho.gateway.model import ServedModel
from sekisho.gateway.prompts import Call, chat_calls, completion_calls
from sekisho.gateway.respond import GenerationResponse
from sekisho.gateway.schemas import ChatRequest, CompletionRequest, Sampling, parse
from sekisho.gateway.store import Tenant, TenantStore

Body = TypeVar("Body", bound=Sampling)
Prepare = Callable[[Body, ServedModel, int], list[Call]]


class Api:
    """Endpoints over one backend, which serves one model to the tenants of one store."""

    def __init__(self, backend: Backend, model: ServedModel, store: TenantStore) -> None:
        self._backend = backend
        self._model = model
        self._store = store
        self._live: set[int] = set()
        # Apart from each other: long prompts must not keep keys from being checked.
        self._authenticators = ThreadPoolExecutor(4, "sekisho-auth")
        self._tokenisers = ThreadPoolExecutor(2, "sekisho-tokenise")

    async def chat_completions(self, request: Request) -> GenerationResponse:
        body, tenant, calls = await self._prepared(request, ChatRequest, chat_calls)
        return self._answer(body, tenant, calls, ChatFormat(self._model.name))

    async def completions(self, request: Request) -> GenerationResponse:
        body, tenant, calls = await self._prepared(request, CompletionRequest, completion_calls)
        return self._answer(body, tenant, calls, CompletionFormat(self._model.name, len(calls)))

    async def models(self, request: Request) -> Response:
        await self._tenant(request)
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        await self._tenant(request)
        self._check_model(request.path_params["model"])
        return JSONResponse(self._described())

    async def liveness(self, request: Request) -> Response:
        record_of(request.scope).endpoint = "liveness"
        return JSONResponse({"status": "live"})

    async def readiness(self, request: Request) -> Response:
        record_of(request.scope).endpoint = "readiness"
        _check_ready(self._room(), self._backend.refusal())
        return JSONResponse({"status": "ready"})

    async def capacity(self, request: Request) -> Response:
        """What the nodes can physically hold, ready or not; for the gate, which has no key."""
        record_of(request.scope).endpoint = "capacity"
        shown: Json = {
            "model": self._model.name,
            "ready": self._backend.ready(),
            **msgspec.to_builtins(self._backend.capacity()),
        }
        return JSONResponse(shown)

    def close(self) -> None:
        self._authenticators.shutdown()
        self._tokenisers.shutdown()

    async def _tenant(self, request: Request) -> Tenant:
        record = record_of(request.scope)
        record.endpoint = request.scope["endpoint"].__name__
        tenant = await authenticate(request, self._store, self._authenticators)
        record.tenant = tenant.id
        return tenant

    async def _prepared(
        self, request: Request, kind: type[Body], prepare: Prepare[Body]
    ) -> tuple[Body, Tenant, list[Call]]:
        """Authenticate, then everything that can be refused before anything is reserved."""
        tenant = await self._tenant(request)
        raw = await read_body(request)

        room = self._room()

        def work() -> tuple[Body, list[Call]]:
            body = parse(kind, raw)
            self._check_model(body.model)
            _check_ready(room)
            return body, prepare(body, self._model, room)

        body, calls = await asyncio.get_running_loop().run_in_executor(self._tokenisers, work)
        return body, tenant, calls

    def _answer(
        self, body: Sampling, tenant: Tenant, calls: list[Call], answer_format: Format
    ) -> GenerationResponse:
        generation = Generation(self._backend, tenant.scope, calls, self._live)
        options = body.stream_options
        usage_chunk = options is not None and bool(options.include_usage)
        return GenerationResponse(generation, calls, answer_format, bool(body.stream), usage_chunk)

    def _check_model(self, name: str) -> None:
        if name != self._model.name:
            message = f"model: {clip(name)} does not exist here; {self._model.name} does"
            raise ApiError(404, "model_not_found", message, "model")

    def _room(self) -> int:
        """Tokens that a request may have, prompt and answer; 0 while tenants cannot be served."""
        return self._backend.tokens_max() if self._backend.ready() else 0

    def _described(self) -> Json:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": self._model.owned_by,
            "max_model_len": self._backend.tokens_max(),
        }


def _check_ready(room: int, why: str = "") -> None:
    if room == 0:
        raise ApiError(503, "not_ready", why or TOLD["not_ready"])
