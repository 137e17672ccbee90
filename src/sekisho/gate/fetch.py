"""HTTP for hostile answers: bounded in bytes and time, and a key goes to one origin only.

An engine that is asked may be broken, or not an engine at all. So a body has a limit, compressed
bodies are refused (a few kilobytes can unpack to gigabytes), a redirect is followed only within
the origin, and nothing of the answer or of an exception's text reaches a message of ours.
"""

import ssl
from types import TracebackType
from typing import Self
from urllib.parse import urljoin, urlsplit

import aiohttp

from sekisho.gate.model import ClaimError, ReadError

BODY_MAX = 8 * 1024 * 1024
"""Bytes of one answer; a large SGLang ``/server_info`` has 40 KB, vLLM's ``/metrics`` 60 KB."""
_REDIRECTS_MAX = 3
_CONNECTIONS_MAX = 256
_CHUNK = 64 * 1024
_GONE = frozenset({404, 405, 501})


class MissingError(ReadError):
    """The engine answers, but not at this path."""


class RefusedError(ReadError):
    """Nobody listens there."""


class Key:
    """A bearer key that no ``repr``, format or comparison shows."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def header(self) -> str:
        """The value of ``Authorization``."""
        return f"Bearer {self._value}"

    def redact(self, body: bytes) -> bytes:
        """``body`` without the key, should the engine echo it."""
        return body.replace(self._value.encode(), b"redacted")

    def __repr__(self) -> str:
        return "Key(...)"


def parse_url(text: str) -> str:
    """An engine's base URL, without a trailing slash.

    Raises:
        ClaimError: not http or https, or with credentials, query or fragment: those hold keys, and
            would be shown. The text is not repeated.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ClaimError("a URL cannot be parsed") from None
    if parts.username is not None or parts.password is not None:
        raise ClaimError("a URL holds credentials: give the key by key_env or key_file instead")
    if parts.query or parts.fragment:
        raise ClaimError("a URL holds a query or fragment: give the engine's base URL")
    bad = parts.scheme not in ("http", "https") or not parts.hostname or port == 0
    if bad or not text.isprintable() or " " in text:
        raise ClaimError(f"{clip(text)}: want http://host:port or https://host:port")
    return text.rstrip("/")


def clip(text: str, limit: int = 200) -> str:
    """``text`` on one line, at most ``limit`` characters: what an engine states may be anything."""
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:limit])
    return line if len(text) <= limit else f"{line}…"


class Client:
    """One pool of connections; use as ``async with``."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_CONNECTIONS_MAX),
            timeout=aiohttp.ClientTimeout(total=None),  # the caller's deadline is over all requests
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # neither a proxy nor a netrc may see a key
            headers={"Accept-Encoding": "identity", "User-Agent": "sekisho-gate"},
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, base: str, path: str, key: Key | None) -> bytes:
        """The body of ``base`` + ``path``, at most `BODY_MAX` bytes.

        Raises:
            MissingError: there is no such path.
            ReadError: no answer, or one that cannot be used. One sentence, nothing of the answer.
        """
        url = base + path
        try:
            for _ in range(_REDIRECTS_MAX + 1):
                answer = await self._once(url, path, key)
                if isinstance(answer, bytes):
                    return answer if key is None else key.redact(answer)
                target = urljoin(url, answer)
                if _origin(target) != _origin(url):
                    raise ReadError(f"{path} redirects to another host, which is not followed")
                url = target
        except aiohttp.ClientPayloadError:
            raise ReadError(f"{path} ended before its answer was complete") from None
        except (ssl.SSLError, aiohttp.ClientSSLError):
            raise ReadError(f"{path}: the TLS certificate is not accepted") from None
        except aiohttp.ClientConnectorError as error:
            is_refused = isinstance(error.os_error, ConnectionRefusedError)
            kind = RefusedError if is_refused else ReadError
            raise kind("no connection: refused or no such host", inconclusive=True) from None
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            raise ReadError(f"{path}: the connection was closed", inconclusive=True) from None
        except (aiohttp.ClientError, ValueError, UnicodeError):
            raise ReadError(f"{path}: the answer is not HTTP that can be read") from None
        raise ReadError(f"{path} redirects more than {_REDIRECTS_MAX} times")

    async def _once(self, url: str, path: str, key: Key | None) -> bytes | str:
        """The body, or where it redirects to."""
        if self._session is None:
            raise RuntimeError("use the client as a context")
        headers = {} if key is None else {"Authorization": key.header()}
        async with self._session.get(url, headers=headers, allow_redirects=False) as response:
            if 300 <= response.status < 400:
                return response.headers.get("Location", "")
            if response.status in _GONE:
                raise MissingError(f"{path} answers {response.status}")
            if response.status in (401, 403):
                raise ReadError(f"{path} answers {response.status}: it wants a key (key_env)")
            if response.status != 200:
                busy = response.status >= 500 or response.status == 429
                raise ReadError(f"{path} answers {response.status}", inconclusive=busy)
            encoding = response.headers.get("Content-Encoding", "identity").lower()
            if encoding != "identity":
                raise ReadError(f"{path} answers compressed, though asked not to")
            body = bytearray()
            async for chunk in response.content.iter_chunked(_CHUNK):
                body += chunk
                if len(body) > BODY_MAX:
                    raise ReadError(f"{path} answers with more than {BODY_MAX >> 20} MiB")
            return bytes(body)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
