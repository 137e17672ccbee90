"""Who sends a request: the bearer key of a tenant."""

import asyncio
from concurrent.futures import Executor

from starlette.requests import Request

from sekisho.gateway.errors import ApiError
from sekisho.gateway.store import Tenant, TenantStore


async def authenticate(request: Request, store: TenantStore, executor: Executor) -> Tenant:
    """The tenant of the ``Authorization`` header. The store is asked in ``executor`` every
    time, so that a revoked key ends at once.

    Raises:
        ApiError: 401 ``invalid_api_key``.
    """
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise _unauthorized("send the API key as the header: Authorization: Bearer KEY")
    loop = asyncio.get_running_loop()
    tenant = await loop.run_in_executor(executor, store.tenant_of, key.strip())
    if tenant is None:
        raise _unauthorized("the API key is unknown or revoked")
    return tenant


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message)
