"""Errors as a client sees them: the OpenAI format, one code each, never a traceback."""

import traceback
from dataclasses import dataclass

import msgspec
from starlette.responses import Response

from sekisho.core.outcome import Kind, Outcome

# What a client is told of a request that did not finish. The outcome's own message may speak of
# pages and leases; it goes to the log, and only a rejection's reaches the client.
TOLD = {
    "context_length_exceeded": "the prompt and the answer do not fit the model's context window",
    "queue_full": "too many requests are waiting; try again later",
    "capacity_exceeded": "the KV-cache pool is full; try again later",
    "not_ready": "the model is not ready to serve; try again later",
    "client_gone": "the request was aborted",
    "shutting_down": "the server is shutting down; try again later",
    "ownership_violation": "a KV-cache page did not belong to this request; no text was released",
    "transfer_failed": "the KV cache of this request could not be moved between nodes",
    "node_lost": "the node that served this request was lost",
    "internal_error": "internal error",
}

# Seconds, for the header Retry-After.
RETRY_AFTER = {
    "queue_full": 1,
    "capacity_exceeded": 2,
    "not_ready": 5,
    "shutting_down": 5,
    "node_lost": 2,
}


@dataclass
class ApiError(Exception):
    """A request that gets an error answer.

    ``param`` names the field of the body at fault, as ``messages[0].content``. ``log`` is for
    the server's log and never sent; like ``message`` it holds no prompt text and no key.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    log: str = ""

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self, request_id: str) -> dict[str, object]:
        """The JSON object of an error answer, or of an error event within a stream."""
        message = self.message
        if self.status >= 500:
            message = f"{message} (request id {request_id})"
        error = {
            "message": message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self, request_id: str) -> Response:
        headers = {}
        if self.code in RETRY_AFTER:
            headers["retry-after"] = str(RETRY_AFTER[self.code])
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        content = msgspec.json.encode(self.body(request_id))
        return Response(content, self.status, headers, "application/json")


def bad_request(code: str, message: str, param: str | None = None) -> ApiError:
    """400 that names the field ``param``."""
    return ApiError(400, code, message, param)


def internal_error(log: str) -> ApiError:
    """500 that tells the client nothing; ``log`` goes to the log with the request id."""
    return ApiError(500, "internal_error", TOLD["internal_error"], log=log)


def from_outcome(outcome: Outcome) -> ApiError:
    """The error of an outcome that is not `Kind.FINISHED`."""
    told = TOLD[outcome.code]
    if outcome.kind is Kind.REJECTED and outcome.message:
        told = outcome.message
    return ApiError(outcome.http_status, outcome.code, told, log=outcome.message)


def clip(text: str) -> str:
    """Client text made fit for a message: at most 64 characters, each printable ASCII."""
    return ascii(text[:64])[1:-1]


def where_raised(error: BaseException) -> str:
    """Type and code lines of an exception, without its message, which may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    return f"{type(error).__name__} at " + " < ".join(reversed(lines))
