"""Ids: does an id that both accounts choose mix up what belongs to whom?

Reports: vllm#10583 and vllm PR#27987 (a client's request id is a key of the whole engine, and
duplicates reach it), vllm PR#49796 (a client's transfer id overwrites another's entry),
vllm#44701 (a client's salt and an adapter's name are one key).
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from sekisho.probe.budget import Cost
from sekisho.probe.canary import Canary, Mint
from sekisho.probe.endpoint import Account, Endpoint
from sekisho.probe.exchange import Answer, Ask, Inconclusive, Outcome, Refused
from sekisho.probe.model import Finding, TechniqueResult, conclude
from sekisho.probe.techniques import tags as tagged
from sekisho.probe.techniques.base import Technique


class _Channel(msgspec.Struct, frozen=True):
    """Where a client names something; ``place`` is of `Ask`."""

    name: str
    place: str
    value: Callable[[str], Any] = str


_CHANNELS = (
    _Channel("X-Request-Id", "headers"),
    _Channel("request_id", "fields"),  # vLLM
    _Channel("rid", "fields"),  # SGLang
    _Channel("user", "fields"),
    _Channel("session_id", "fields"),
    _Channel("safety_identifier", "fields"),
    _Channel("prompt_cache_key", "fields"),
    _Channel("metadata", "fields", lambda chosen: {"session_id": chosen, "trace_id": chosen}),
)
_TOGETHER = 2  # requests that run at once
_ROW = 3  # one after the other: first account, second, first again
_TRIALS = _TOGETHER + _ROW - 1  # the first of a row has nobody before it


class Ids(Technique):
    """Both accounts send the same id, by each way of sending one: in two streams at once, and in
    three requests one after the other. Each request carries a tag of its own, for which the
    answers of the other account are searched.

    A way that is refused when the first account uses it alone is not offered.

    Args:
        rounds: how often, by each way; every round has a new id.
    """

    name = "ids"
    goal = "see the other account's answer under an id that both have chosen"
    report = "vllm#10583"

    def __init__(self, *, rounds: int = 2, answer_tokens: int = 96) -> None:
        self._rounds = rounds
        self._answer_tokens = answer_tokens

    def cost(self) -> Cost:
        each = Cost(1, tagged.PROMPT_TOKENS, self._answer_tokens)
        return each.times(len(_CHANNELS) * (1 + self._rounds * (_TOGETHER + _ROW)))

    async def run(self, endpoint: Endpoint, mint: Mint) -> TechniqueResult:
        sender = _Sender(endpoint, mint, self._answer_tokens)
        trials: list[Outcome] = []
        unmade: Counter[str] = Counter()
        not_offered = []
        findings = []
        for channel in _CHANNELS:
            alone = await sender.send(endpoint.accounts[0], channel, str(uuid.uuid4()))
            if isinstance(alone, Refused):
                not_offered.append(channel.name)
            elif isinstance(alone, Inconclusive):
                unmade[alone.reason] += self._rounds * _TRIALS
            else:
                first = len(sender.sent)
                for _ in range(self._rounds):
                    trials += await self._round(endpoint, sender, channel)
                findings += self._names(channel, sender.sent[first:])
        found = [*self._foreign(sender), *findings]
        shown = tagged.sensitivity(sender.sent, sender.tags)
        result = conclude(self.name, trials, found, sensitivity=shown, unplanted=unmade)
        return msgspec.structs.replace(result, not_offered=tuple(not_offered))

    async def _round(
        self, endpoint: Endpoint, sender: "_Sender", channel: _Channel
    ) -> list[Outcome]:
        """Five requests with one id; the trials among them."""
        first, second = endpoint.accounts
        chosen = str(uuid.uuid4())
        together = await asyncio.gather(
            *(sender.send(one, channel, chosen, stream=True) for one in (first, second))
        )
        chosen = str(uuid.uuid4())
        row = [await sender.send(one, channel, chosen) for one in (first, second, first)]
        return [*together, *row[1:]]

    def _foreign(self, sender: "_Sender") -> list[Finding]:
        """Tags of any request: those in streams first, by a rule of their own."""
        found = tagged.foreign(self.name, sender.sent, sender.tags, report=self.report)
        streams = {one.serial for one in sender.sent if one.ask.stream}
        crossed = [one for one in found if one.seen_in in streams]
        return [
            *(msgspec.structs.replace(one, rule="PROBE008") for one in crossed),
            *(one for one in found if one.seen_in not in streams),
        ]

    def _names(self, channel: _Channel, outcomes: list[Outcome]) -> list[Finding]:
        """Answers to different accounts that have one name."""
        owners: dict[str, dict[str, int]] = {}
        for one in outcomes:
            if isinstance(one, Answer) and one.whole.answer_name:
                owners.setdefault(one.whole.answer_name, {})[one.account] = one.serial
        shared = [serials for serials in owners.values() if len(serials) > 1]
        if not shared:
            return []
        listed = " and ".join(str(serial) for serial in sorted(shared[0].values()))
        return [
            Finding(
                rule="PROBE009",
                technique=self.name,
                message=(
                    f"answers to both accounts have one name where both chose one {channel.name}: "
                    f"requests {listed}, and {len(shared) - 1} more pairs"
                ),
                seen_in=max(shared[0].values()),
                planted_in=min(shared[0].values()),
                observed=len(shared),
                expected=0,
                report=self.report,
            )
        ]


class _Sender:
    """Sends tagged requests and keeps what came."""

    def __init__(self, endpoint: Endpoint, mint: Mint, answer_tokens: int) -> None:
        self.sent: list[Outcome] = []
        self.tags: dict[int, Canary] = {}
        self._endpoint = endpoint
        self._mint = mint
        self._answer_tokens = answer_tokens

    async def send(
        self, account: Account, channel: _Channel, chosen: str, *, stream: bool = False
    ) -> Outcome:
        """One request with a new tag and the chosen id."""
        tag = self._mint.canary("account number")
        value = {channel.name: channel.value(chosen)}
        ask = Ask(
            prompt=tagged.prompt(tag),
            answer_tokens=self._answer_tokens,
            stream=stream,
            fields=value if channel.place == "fields" else {},
            headers=value if channel.place == "headers" else {},
        )
        outcome = await self._endpoint.ask(account, ask)
        self.tags[outcome.serial] = tag
        self.sent.append(outcome)
        return outcome
