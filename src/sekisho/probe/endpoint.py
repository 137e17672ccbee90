"""Two accounts at one OpenAI-compatible endpoint, which may be broken or worse.

`Endpoint.ask` returns an answer, a refusal or `Inconclusive`; nothing of the network escapes as an
exception. Bodies and time are bounded, nothing is decompressed, no redirect is followed, a key
goes to one host and into no text of ours. Each account has connections of its own, so that answers
of the two cannot be mixed up on this side.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeAlias

import aiohttp
import msgspec

from sekisho.gate.fetch import Key, parse_url
from sekisho.probe.budget import Budget, Cost, Purse, estimate_tokens
from sekisho.probe.cut import Cut, exchange
from sekisho.probe.exchange import (
    Answer,
    Ask,
    ExchangeError,
    Inconclusive,
    Outcome,
    Refused,
    UnreachedError,
    Whole,
)
from sekisho.probe.reading import FAULTS, Seen, pieces, read, sentence

TRIES_MAX = 5
WAIT_MAX_S = 120.0
"""Who asks to wait longer is not waited for."""
_COMMON = {"Accept-Encoding": "identity", "User-Agent": "sekisho-probe"}


class Account:
    """A name for reports, and the key that no report shows."""

    def __init__(self, name: str, key: Key | None) -> None:
        self.name = name
        self.key = key

    def __repr__(self) -> str:
        return f"Account({self.name!r})"


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: Any = None  # of an adapter, its model (vLLM, SGLang)


class _Models(msgspec.Struct):
    data: list[_Model]


_Exchange: TypeAlias = Callable[[Account, Ask, Seen], Awaitable[Whole | str]]


class Endpoint:
    """Use as ``async with``.

    Args:
        base_url: as the ``openai`` client takes it, usually with ``/v1`` at its end.
        timeout_s: for one request, from the first byte sent to the last received.
        backoff_s: the first wait after a 429 that names no time; it doubles each time.
        log: told every outcome as it comes, tries that were repeated too.
        serial: of the last request of an earlier part of the run.

    Raises:
        ClaimError: the URL cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        accounts: tuple[Account, Account],
        *,
        budget: Budget | None = None,
        timeout_s: float = 120.0,
        backoff_s: float = 1.0,
        count_tokens: Callable[[str], int] = estimate_tokens,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        log: Callable[[Outcome], None] | None = None,
        serial: int = 0,
    ) -> None:
        if accounts[0].name == accounts[1].name:
            raise ValueError("two accounts need two names")
        self.base_url = parse_url(base_url)
        self.model = model
        self.accounts = accounts
        self.purse = Purse(budget or Budget())
        self.waited_s = 0.0
        self._timeout_s = timeout_s
        self._backoff_s = backoff_s
        self._count_tokens = count_tokens
        self._sleep = sleep
        self._log = log
        self._serial = serial
        self._room = asyncio.Semaphore(self.purse.budget.concurrency_max)
        self._pause = {one.name: asyncio.Lock() for one in accounts}
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        for account in self.accounts:
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self.purse.budget.concurrency_max),
                timeout=aiohttp.ClientTimeout(total=None),  # ours is over headers and body
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,  # neither a proxy nor a netrc may see a key
                headers=_COMMON,
            )
            self._sessions[account.name] = await self._stack.enter_async_context(session)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def cost(self, ask: Ask) -> Cost:
        """The most that ``ask`` can cost, as far as it can be estimated."""
        prompt_tokens = self._count_tokens(ask.prompt) + ask.more_tokens
        return Cost(1, prompt_tokens, ask.answer_tokens)

    async def ask(self, account: Account, ask: Ask) -> Outcome:
        """Send it, wait where the endpoint asks to, and try again; at most `TRIES_MAX` times.

        Cancelling the call cuts the connection.
        """
        async with self._room:
            for attempt in range(TRIES_MAX):
                # Who waits for a rate limit holds the account's lock, and so all of its requests.
                async with self._pause[account.name]:
                    pass
                seen = Seen()
                outcome = await self._once(account, ask, seen, self._exchange)
                wait_s = self._backoff_s * 2**attempt if seen.wait_s is None else seen.wait_s
                if not seen.busy or wait_s > WAIT_MAX_S or attempt + 1 == TRIES_MAX:
                    break
                self.waited_s += wait_s
                async with self._pause[account.name]:
                    await self._sleep(wait_s)
            return outcome

    async def ask_and_leave(
        self,
        account: Account,
        ask: Ask,
        after_s: float | None,
        *,
        share: float = 1.0,
        half_close: bool = False,
    ) -> Outcome:
        """Send it on a connection of its own and close that, as `cut.Cut` says; once.

        Inconclusive with `cut.LEFT` as its reason, unless all of the answer had come by then.
        """
        cut = Cut(after_s=after_s, share=share, half_close=half_close)

        async def cut_off(account: Account, ask: Ask, seen: Seen) -> Whole | str:
            async with asyncio.timeout(self._timeout_s):
                head = _COMMON | _head(account, ask.headers)
                body = msgspec.json.encode(ask.body(self.model))
                return await exchange(self._url(ask), head, body, seen, cut, stream=ask.stream)

        async with self._room:
            async with self._pause[account.name]:
                pass
            return await self._once(account, ask, Seen(), cut_off)

    async def models(self, account: Account) -> dict[str, int | None]:
        """The models by name, with the window that ``/models`` states (vLLM, SGLang and Sekisho
        call it ``max_model_len``); empty where nothing can be read."""
        return {one.id: one.max_model_len for one in await self._listed(account)}

    async def adapters(self, account: Account) -> list[str]:
        """The models that ``/models`` calls children of the one that is asked."""
        return [one.id for one in await self._listed(account) if one.parent == self.model]

    async def _listed(self, account: Account) -> list[_Model]:
        seen = Seen()
        if self.purse.take(Cost(1)):
            return []
        with contextlib.suppress(*FAULTS, ExchangeError):
            async with (
                asyncio.timeout(self._timeout_s),
                self._session(account).get(
                    f"{self.base_url}/models", headers=_head(account, {}), allow_redirects=False
                ) as response,
            ):
                async for _ in pieces(response, seen):
                    pass
            # What msgspec raises is a ValueError.
            return msgspec.json.decode(bytes(seen.body), type=_Models).data
        return []

    async def _once(self, account: Account, ask: Ask, seen: Seen, how: _Exchange) -> Outcome:
        """Paid for, sent, and told to the log."""
        self._serial += 1
        serial = self._serial
        taken = self.cost(ask)
        found: Whole | str | None = None
        reason = self.purse.take(taken)
        sent = not reason
        if sent:
            try:
                found = await how(account, ask, seen)
            except ExchangeError as error:
                reason = str(error)
                sent = not isinstance(error, UnreachedError)
            except FAULTS as error:
                reason = sentence(error, self._timeout_s)
                sent = not isinstance(error, aiohttp.ClientConnectorError)
        raw = bytes(seen.body).decode("utf-8", "replace")
        common: dict[str, Any] = {
            "serial": serial,
            "account": account.name,
            "ask": ask,
            "seconds": seen.seconds(),
            "status": seen.status,
            "raw": self._redacted(raw),
        }
        outcome: Outcome
        if isinstance(found, Whole):
            self.purse.settle(taken, _used(taken, found))
            outcome = Answer(whole=self._redacted_whole(found), **common)
        elif found is not None:
            self.purse.settle(taken, Cost(1))
            outcome = Refused(message=self._redacted(found), **common)
        else:
            text = self._redacted(seen.text())
            outcome = Inconclusive(reason=reason, text=text, sent=sent, **common)
        if self._log is not None:
            self._log(outcome)
        return outcome

    async def _exchange(self, account: Account, ask: Ask, seen: Seen) -> Whole | str:
        async with (
            asyncio.timeout(self._timeout_s),
            self._session(account).post(
                self._url(ask),
                data=msgspec.json.encode(ask.body(self.model)),
                headers=_head(account, ask.headers),
                allow_redirects=False,
            ) as response,
        ):
            return await read(response, seen, ask.stream)

    def _url(self, ask: Ask) -> str:
        return self.base_url + ("/chat/completions" if ask.chat else "/completions")

    def _redacted(self, text: str) -> str:
        """Without the keys of both accounts, should the endpoint show one."""
        for account in self.accounts:
            if account.key is not None:
                text = account.key.redact(text.encode("utf-8", "replace")).decode()
        return text

    def _redacted_whole(self, whole: Whole) -> Whole:
        clean, replace = self._redacted, msgspec.structs.replace
        return replace(
            whole,
            text=clean(whole.text),
            aside=clean(whole.aside),
            answer_name=clean(whole.answer_name),
            events=tuple(
                replace(one, text=clean(one.text), answer_name=clean(one.answer_name))
                for one in whole.events
            ),
        )

    def _session(self, account: Account) -> aiohttp.ClientSession:
        if account.name not in self._sessions:
            raise RuntimeError("use the endpoint as a context, and its own accounts")
        return self._sessions[account.name]


def _head(account: Account, more: Mapping[str, str]) -> dict[str, str]:
    head = {"Content-Type": "application/json"}
    if account.key is not None:
        head["Authorization"] = account.key.header()
    return head | dict(more)


def _used(taken: Cost, whole: Whole) -> Cost:
    """As the endpoint counted, where it did."""
    prompt, answer = whole.prompt_tokens, whole.completion_tokens
    return Cost(
        1,
        taken.prompt_tokens if prompt is None else prompt,
        taken.answer_tokens if answer is None else answer,
    )
