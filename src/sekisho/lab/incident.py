"""One trial: A asks about a private document and is answered; then B asks something too long.

In between a third tenant asks something short, as on any busy platform: it takes the pages that A
left free, so that the pool, which reuses the oldest free page first, comes back to A's pages in
their order, and B's reservation has them at the same ordinals.
"""

import random
import re
from typing import NamedTuple

import msgspec

from sekisho.engine.demo import NAME
from sekisho.lab.machine import (
    ANSWER_TOKENS,
    DECODE_PAGES,
    PAGE_SIZE,
    PREFILL_TOKENS,
    WINDOW,
    LabModel,
    Machine,
    State,
)
from sekisho.lab.results import Incident, Side
from sekisho.lab.story import Story, small_talk, tell
from sekisho.lab.switches import Switches

TENANT_A, TENANT_B, TENANT_C = "tenant-a", "tenant-b", "tenant-c"
_OVER = 8  # B is over the prefill pool by half a page, or by the sentence that comes to it
_SHORT_ANSWER = 4
_WORDS_MIN = 4


class _Key(NamedTuple):
    """What of an engine acts while A and C run: trials that agree in it start from one state."""

    story: Story
    erases: bool
    scrubs: bool
    digests: bool


class Lab:
    """Plays trials on one machine; the texts of trial ``i`` depend on ``seed`` and ``i`` alone."""

    def __init__(self, model: LabModel, seed: int) -> None:
        self.machine = Machine(model)
        self.seed = seed
        self._states: dict[_Key, tuple[State, Side]] = {}
        self._stories: dict[int, Story] = {}

    def story(self, trial: int) -> Story:
        """The texts of a trial."""
        if trial not in self._stories:
            rng = random.Random(f"sekisho lab {self.seed} {trial}")
            # A's prompt and answer fit both roles: every engine here serves A.
            document, question = PREFILL_TOKENS - ANSWER_TOKENS, PREFILL_TOKENS + _OVER
            self._stories[trial] = tell(rng, self.machine.count, document, question)
        return self._stories[trial]

    def play(self, trial: int, switches: Switches) -> Incident:
        """One trial under ``switches``. What comes before B is computed once for all engines that
        do the same until then, and each of them starts from the same bytes and ledgers."""
        story = self.story(trial)
        scrubs, digests = switches.guards("scrub-on-free"), switches.guards("payload-digest")
        key = _Key(story, switches.erases, scrubs, digests)
        if key not in self._states:
            if any(known.story != story for known in self._states):
                self._states.clear()  # of an earlier trial
            self._states[key] = self._before_b(story, switches)
        state, a = self._states[key]
        self.machine.start(switches, state)
        b = self.machine.ask(TENANT_B, story.question)
        before, after = self.machine.pages_of_last()
        defects, defences = switches.names()
        return Incident(
            model=NAME,
            window=WINDOW,
            prefill_pool=PREFILL_TOKENS,
            decode_pool=DECODE_PAGES * PAGE_SIZE,
            page_size=PAGE_SIZE,
            secret=story.secret,
            document=story.document,
            question=story.question,
            defects=defects,
            defences=defences,
            a=a,
            b=msgspec.structs.replace(b, marked=marked_spans(b.text, story.document, story.secret)),
            before=before,
            after=after,
            leaked=story.secret in b.text,
        )

    def _before_b(self, story: Story, switches: Switches) -> tuple[State, Side]:
        self.machine.start(switches)
        a = self.machine.ask(TENANT_A, story.document)
        # The last token of an answer is never computed; so many pages has A left untouched.
        used = a.prompt_tokens + a.completion_tokens - 1
        pages = DECODE_PAGES - -(-used // PAGE_SIZE)
        rng = random.Random(f"small talk {story.secret}")
        # Whether its short answer stops early or not, it ends in the last of them.
        tokens = pages * PAGE_SIZE - 2 * _SHORT_ANSWER
        self.machine.ask(
            TENANT_C, small_talk(rng, self.machine.count, tokens), answer_tokens=_SHORT_ANSWER
        )
        return self.machine.state(), a


def outcome_of(incident: Incident) -> str:
    """The outcome class of a trial, as `results` names them."""
    if incident.leaked:
        return "leak"
    if incident.b.status == 400:
        return "refused"
    if incident.b.status != 200:
        return "failed"
    # B's prompt does not fit the prefill pool: no engine here can have answered it.
    return "wrong-answer"


def marked_spans(text: str, document: str, secret: str) -> list[tuple[int, int]]:
    """Where ``text`` repeats four words in a row of ``document``, or more, or its ``secret``.

    Returns:
        [start, end) spans in order, which do not overlap.
    """
    words = [match.span() for match in re.finditer(r"\w+", text)]
    spans: list[tuple[int, int]] = []
    for first, (start, _) in enumerate(words):
        if spans and start < spans[-1][1]:
            continue
        end = start
        for count, (_, word_end) in enumerate(words[first:], 1):
            if text[start:word_end] not in document:
                break
            if count >= _WORDS_MIN or secret in text[start:word_end]:
                end = word_end
        if end > start:
            spans.append((start, end))
    return spans
