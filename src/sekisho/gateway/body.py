"""The body of a request: read up to a limit, decoded strictly."""

import json
import re

from starlette.requests import Request

from sekisho.gateway.errors import ApiError, bad_request, clip

BODY_MAX = 32 * 1024 * 1024  # bytes

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_body(request: Request) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 where it is above `BODY_MAX`.
        ClientDisconnect: the client left before its end.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > BODY_MAX:
        raise _too_large()
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_MAX:
            raise _too_large()
    return bytes(body)


def decode_body(body: bytes) -> dict[str, object]:
    """The JSON object in ``body``.

    NaN and Infinity pass here, so that the schema can name the field that they are in.

    Raises:
        ApiError: 400 for invalid UTF-8, broken or too deep JSON, a repeated key, a lone
            surrogate, or a value that is not an object.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise bad_request("invalid_utf8", f"the body is not UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        message = f"the body is not valid JSON: {error.msg} at character {error.pos}"
        raise bad_request("invalid_json", message) from None
    except ValueError:  # an integer of more digits than Python converts
        raise bad_request("invalid_json", "the body holds a number that is too long") from None
    except RecursionError:
        raise bad_request("invalid_json", "the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise bad_request("invalid_json", "the body must be a JSON object")
    if _SURROGATE_ESCAPE.search(text):
        for name, part in value.items():
            if _has_surrogate([name, part]):
                message = f"{clip(name)} holds a lone surrogate, which is not Unicode text"
                raise bad_request("invalid_unicode", message, clip(name))
    return value


def _too_large() -> ApiError:
    return ApiError(413, "request_too_large", f"the body is above {BODY_MAX} bytes")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Two readers of one body must not see two values of one key."""
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                message = f"the key {clip(name)} is repeated"
                raise bad_request("invalid_json", message, clip(name))
            seen.add(name)
    return value


def _has_surrogate(value: object) -> bool:
    """Walks without recursion: the parser may go deeper than Python's own stack."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            try:
                part.encode()
            except UnicodeEncodeError:
                return True
        elif isinstance(part, dict):
            left.extend(part)
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)
    return False
