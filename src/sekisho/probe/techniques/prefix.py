"""Prefix: does a prompt that begins as the other account's go on with the other's secret?

Reports: vllm PR#12621 (a collision of hashes continues another request's topic), TGI PR#2489 and
TRT-LLM PR#19545 (pages of a prefix that were never filled, or filled with another's, are reused),
vllm#44701 (a salt that equals an adapter's name shares its pages), vllm PR#54342 and sglang#37160
(an outer cache forgets salt and adapter), lmcache#690 and lmcache#4086 (pictures share a key).
"""

import uuid
from typing import Any

import msgspec

from sekisho.probe.budget import Cost
from sekisho.probe.canary import Canary, Mint
from sekisho.probe.endpoint import Endpoint
from sekisho.probe.exchange import Answer, Ask, Inconclusive, Outcome, Refused
from sekisho.probe.match import run
from sekisho.probe.model import TechniqueResult
from sekisho.probe.techniques.base import WORDS_TO_TOKENS, Notes, Technique
from sekisho.probe.techniques.pictures import data_url

_CUTS = 3
_TAIL_WORDS = 60
_ADAPTERS_MAX = 2
_ARMS_OF_ADAPTER = 3
_PICTURE_ASKS = 2
_PICTURE_TOKENS = 1_500
_NOT_HERE = 403, 404, 405, 501
_LOOK = "Which number stands in the picture? Write its digits, and nothing else."


class _Arm(msgspec.Struct, frozen=True):
    """A way to plant and to ask; ``first`` and ``second`` are fields of the two accounts."""

    name: str
    first: dict[str, Any] = {}
    second: dict[str, Any] = {}


class Prefix(Technique):
    """The first account sends a text with a secret, the second the same text up to just before the
    secret, to the end of the sentence before it, and to its half. A continuation with the secret is
    proof. Texts have many lengths, so that the cuts fall on many places of a cache's pages.

    The same again with what may take part in a cache's key, where the endpoint takes it: salts
    (each its own, and both the same), ``prompt_cache_key``, ``session_id``, adapters of the model,
    and pictures (the second account sends another one of the same size, then none).

    Args:
        documents: texts without more; ``variant_documents`` of each other kind.
        words: of the longest text before the secret.
        pictures: pairs; 0 asks for none. A few hundred find identities that are cut to 16 bits.
        models: more models to plant with, besides those that ``/models`` calls adapters.
    """

    name = "prefix"
    goal = "see the other account's secret as the continuation of the text that stood before it"
    report = "vllm PR#12621"

    def __init__(
        self,
        *,
        documents: int = 8,
        variant_documents: int = 2,
        words: int = 300,
        pictures: int = 2,
        models: tuple[str, ...] = (),
        answer_tokens: int = 32,
        sensitivity: float = 1.0,
    ) -> None:
        self._documents = documents
        self._variant_documents = variant_documents
        self._words = words
        self._pictures = pictures
        self._models = models
        self._answer_tokens = answer_tokens
        self._sensitivity = sensitivity

    def cost(self) -> Cost:
        adapters = _ADAPTERS_MAX + len(self._models)
        arms = len(_salted("")) + _ARMS_OF_ADAPTER * adapters
        documents = self._documents + self._variant_documents * arms
        tokens = (self._words + _TAIL_WORDS + 60) * WORDS_TO_TOKENS
        text = Cost(1, tokens, self._answer_tokens)
        picture = Cost(1, 60 + _PICTURE_TOKENS, self._answer_tokens)
        asked = text.times(documents * (1 + _CUTS) + 2)
        return asked + picture.times(self._pictures * (1 + _PICTURE_ASKS)) + Cost(1)

    async def run(self, endpoint: Endpoint, mint: Mint) -> TechniqueResult:
        notes = Notes(self, endpoint, mint)
        chat = await self._is_chat(notes)
        if chat is not None:
            await self._texts(notes, _Arm("text"), self._documents, chat)
            listed = await endpoint.adapters(endpoint.accounts[0])
            arms = [*_salted(str(uuid.uuid4()))]
            for model in [*listed[:_ADAPTERS_MAX], *self._models]:
                arms += _adapted(model)
            for arm in arms:
                await self._texts(notes, arm, self._variant_documents, chat)
        await self._look_at_pictures(notes)
        return notes.conclude(self._sensitivity)

    async def _is_chat(self, notes: Notes) -> bool | None:
        """Which path answers; None, with the reason noted, where neither does."""
        for chat in (False, True):
            ask = Ask(prompt=notes.mint.filler(20), answer_tokens=self._answer_tokens, chat=chat)
            outcome = await notes.look(ask)
            if isinstance(outcome, Answer):
                if chat:
                    notes.refused("completions")
                return chat
        notes.skipped(outcome, self._documents * _CUTS)
        return None

    async def _texts(self, notes: Notes, arm: _Arm, count: int, chat: bool) -> None:
        """All texts of an arm; none more once one is refused that would be answered without."""
        for index in range(count):
            words = max(16, self._words * (index + 1) // count - 5 * index)
            canary = notes.mint.canary()
            before, text = _text(notes.mint, canary, words)
            ask = Ask(prompt=text, answer_tokens=self._answer_tokens, chat=chat, fields=arm.first)
            sending = notes.endpoint.ask(notes.endpoint.accounts[0], ask)
            outcome = await notes.plant_by((canary,), sending)
            if not isinstance(outcome, Answer):
                if arm.first | arm.second and _not_offered(outcome):
                    notes.refused(arm.name)
                    return
                notes.skipped(outcome, _CUTS)
                continue
            for prompt in _cuts(before, words):
                asked = msgspec.structs.replace(ask, prompt=prompt, fields=arm.second)
                seen = await notes.look(asked)
                if arm.second and _not_offered(seen):
                    notes.trials = [one for one in notes.trials if one is not seen]
                    notes.refused(arm.name)
                    return

    async def _look_at_pictures(self, notes: Notes) -> None:
        """Pairs of pictures of the same size and question."""
        for _ in range(self._pictures):
            secret, other = (notes.mint.canary("account number") for _ in range(2))
            sending = notes.endpoint.ask(
                notes.endpoint.accounts[0], self._picture(_LOOK, secret.text)
            )
            outcome = await notes.plant_by((secret,), sending)
            if not _reads(outcome, secret):
                notes.refused("pictures")
                return
            await notes.look(self._picture(_LOOK, other.text))
            await notes.look(self._picture(f"<image>\n{_LOOK}", None))

    def _picture(self, text: str, number: str | None) -> Ask:
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if number is not None:
            content.insert(0, {"type": "image_url", "image_url": {"url": data_url(number)}})
        return Ask(
            prompt=text if number is None else f"[picture of {number}]\n{text}",
            answer_tokens=self._answer_tokens,
            fields={"messages": [{"role": "user", "content": content}]},
            more_tokens=0 if number is None else _PICTURE_TOKENS,
        )


def _salted(chosen: str) -> list[_Arm]:
    """What clients may name, and caches may forget, or believe."""
    other = f"{chosen}-2"
    return [
        _Arm("cache_salt", {"cache_salt": chosen}, {"cache_salt": other}),
        *(
            _Arm(name, {name: chosen}, {name: chosen})
            for name in ("cache_salt", "prompt_cache_key", "session_id")
        ),
    ]


def _adapted(model: str) -> list[_Arm]:
    """With an adapter by either account, and with its name as the other's salt."""
    name = f"model {model}"
    return [
        _Arm(name, {"model": model}, {}),
        _Arm(name, {}, {"model": model}),
        _Arm(name, {"model": model}, {"cache_salt": model}),
    ]


def _text(mint: Mint, canary: Canary, words: int) -> tuple[str, str]:
    """All before the secret, and the whole: the secret comes again, and more follows, so that
    pages after the cut hold it too."""
    begin = f"Report {mint.number()}. {mint.filler(words)}\n"
    sentence = canary.sentence()
    before = begin + sentence[: sentence.index(canary.text)].rstrip()
    tail = f"{sentence} {sentence} {mint.filler(_TAIL_WORDS)}"
    return before, f"{begin}{tail}"


def _cuts(before: str, words: int) -> list[str]:
    """What the second account sends; none holds a part of the secret."""
    begin = before[: before.rindex("\n")]
    half = " ".join(before.split(" ")[: max(2, words // 2)])
    return [before, begin, half]


def _not_offered(outcome: Outcome) -> bool:
    """Is it this part that is refused, rather than the endpoint that fails?"""
    if isinstance(outcome, Inconclusive):
        return outcome.status in _NOT_HERE
    return isinstance(outcome, Refused)


def _reads(outcome: Outcome, secret: Canary) -> bool:
    """Does the endpoint take pictures, and its model see what stands in one?"""
    return isinstance(outcome, Answer) and any(
        run(secret, text) is not None for text in outcome.texts()[:2]
    )
