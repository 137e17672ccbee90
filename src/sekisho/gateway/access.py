"""One log line a request, the request id, and the last resort for unforeseen exceptions."""

import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sekisho.gateway.errors import ApiError, internal_error, where_raised

log = logging.getLogger("sekisho.access")

_KEY = "sekisho.record"


@dataclass
class Record:
    """What the access line says. It holds no text of a client: no path, no model name, no key."""

    request_id: str = field(default_factory=lambda: f"req_{secrets.token_hex(16)}")
    tenant: str = "-"
    endpoint: str = "-"
    status: int = 0
    code: str = "-"
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def failed(self, error: ApiError) -> None:
        """Take note of the error that ends the request; server-side ones get a line of their
        own, which is where the evidence of an ownership violation goes."""
        self.code = error.code
        if error.status >= 500:
            log.error("request=%s code=%s %s", self.request_id, error.code, error.log)


def record_of(scope: Scope) -> Record:
    """The record that the middleware keeps for this request."""
    return cast(Record, scope[_KEY])


class AccessLog:
    """ASGI middleware. The request id is made here; a client's own ``x-request-id`` is not read.

    No exception passes: the server outside would log its message, which may quote a prompt.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[_KEY] = Record()
        began = time.monotonic()

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                mark = (b"x-request-id", record.request_id.encode())
                message = {**message, "headers": [*message["headers"], mark]}
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except ClientDisconnect:
            record.code = "client_gone"
            record.status = record.status or 499
        except Exception as error:
            failure = internal_error(where_raised(error))
            record.failed(failure)
            if not record.status:
                await failure.response(record.request_id)(scope, receive, send_marked)
        finally:
            log.info(
                "request=%s tenant=%s endpoint=%s status=%d code=%s prompt_tokens=%d "
                "completion_tokens=%d ms=%d",
                record.request_id,
                record.tenant,
                record.endpoint,
                record.status,
                record.code,
                record.prompt_tokens,
                record.completion_tokens,
                (time.monotonic() - began) * 1000,
            )
