"""One request at a vLLM prefill/decode pair: prefill first, then decode with what prefill signed.

    prefill   POST ── whole prompt computed ── manifest, signed
    decode                                     POST ── fetched, compared ── tokens ──
    released                                                             |── from here

Decode's guard compares the manifest with its own prompt before it reserves anything, and every
block with its header before it computes a token. Without a manifest decode is not even asked.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

from sekisho.engine.output import Delta, Ended
from sekisho.engine.params import SamplingParams
from sekisho.engine.tokenizer import Tokenizer
from sekisho.gateway.engines.answer import Answer
from sekisho.gateway.engines.events import EventsError, events
from sekisho.gateway.engines.replica import Replica
from sekisho.gateway.engines.side import FailureError, Step, broken, refusal_of, refused
from sekisho.gateway.engines.vllm_events import Handed, Reader, handed
from sekisho.gateway.engines.vllm_request import first, second

_AHEAD_MAX = 64  # decode's events that may wait for a slow client
_ANSWER_MAX = 1024 * 1024  # bytes of prefill's one answer
_PATH = "/v1/completions"


class Exchange:
    """Runs one request; `events` may be used once. Closing it closes the connection to the side
    that works on it, which is how vLLM is told to abort."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        prefill: Replica,
        decode: Replica,
        tokens: list[int],
        scope_key: str,
        tokenizer: Tokenizer,
        params: SamplingParams,
    ) -> None:
        self._session = session
        self._prefill, self._decode = prefill, decode
        self._tokens = tokens
        self._scope_key = scope_key
        self._tokenizer = tokenizer
        self._params = params
        self._transfer = f"sekisho-{secrets.token_hex(16)}"
        self._told: asyncio.Queue[Step | FailureError | None] = asyncio.Queue()
        self._ahead = asyncio.Semaphore(_AHEAD_MAX)
        self._cached = 0

    async def events(self, request: int) -> AsyncGenerator[Delta | Ended, None]:
        """Deltas and one `Ended`."""
        watches = [replica.watch(self._end) for replica in (self._prefill, self._decode)]
        running = asyncio.create_task(self._run())
        answer = Answer(request, self._params, self._tokenizer)
        try:
            while (told := await self._told.get()) is not None:
                if isinstance(told, FailureError):
                    yield Ended(request, told.code, told.message, answer.count, self._cached)
                    return
                self._ahead.release()
                yield answer.take(told.tokens, told.infos)
                if answer.cut and not told.finish:
                    break
                if told.finish and not answer.end:
                    yield answer.close(told.finish)
            yield Ended(request, answer.end, "", answer.count, self._cached)
        finally:
            for unwatch in watches:
                unwatch()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run(self) -> None:
        """Both sides, one after the other; the end is told whatever it is."""
        side = self._prefill
        try:
            said = await self._computed()
            self._cached = said.cached
            side = self._decode
            await self._answered(said)
            self._told.put_nowait(None)
        except Exception as error:  # a request that waits for its end gets one
            self._told.put_nowait(broken(error, side))

    async def _computed(self) -> Handed:
        """Prefill's word for the prompt."""
        side = self._prefill
        body = first(self._tokens, self._scope_key, self._transfer)
        length = len(self._tokens)
        async with self._session.post(side.url + _PATH, json=body) as response:
            if response.status != 200:
                text = await refusal_of(response)
                raise refused(side.name, response.status, text, length, body["max_tokens"])
            answer = b""
            async for chunk in response.content.iter_any():
                answer += chunk
                if len(answer) > _ANSWER_MAX:
                    raise FailureError("internal_error", f"{side.name}: an answer without end")
        return handed(side.name, answer, length, self._transfer)

    async def _answered(self, said: Handed) -> None:
        """Decode's tokens, up to its clean end."""
        side = self._decode
        where: dict[str, Any] = {
            **said.params,
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": said.engine,
            "remote_bootstrap_addr": self._prefill.bootstrap_url,
            "transfer_id": self._transfer,
        }
        body = second(self._tokens, self._params, self._scope_key, where)
        reader = Reader(side.name, self._tokens, self._params, self._tokenizer)
        async with self._session.post(side.url + _PATH, json=body) as response:
            if response.status != 200:
                raise reader.refused(response.status, await refusal_of(response))
            async for data in events(response.content.iter_any()):
                step = reader.read(data)
                if step is not None:
                    await self._ahead.acquire()
                    self._told.put_nowait(step)
        if not reader.is_over:
            raise EventsError("the answer ended without its count")

    def _end(self, code: str, why: str) -> None:
        self._told.put_nowait(FailureError(code, why))
