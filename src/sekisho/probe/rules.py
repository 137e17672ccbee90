"""The probe's rules by stable id: what SARIF and the docs name. An id is never given twice."""

from enum import StrEnum

import msgspec


class Certainty(StrEnum):
    """How a rule knows. The order is that of a report."""

    CERTAIN = "certain"
    STATISTICAL = "statistical"
    STRUCTURAL = "structural"


class Rule(msgspec.Struct, frozen=True):
    """``is_leak``: one account had something of the other; else a fault that leads there.

    ``help`` is one sentence.
    """

    id: str
    name: str
    certainty: Certainty
    is_leak: bool
    help: str


_C, _S, _T = Certainty.CERTAIN, Certainty.STATISTICAL, Certainty.STRUCTURAL

RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule(
            "PROBE001",
            "canary-in-answer",
            _C,
            True,
            "What one account was sent holds a secret that only the other account sent.",
        ),
        Rule(
            "PROBE002",
            "near-canary-in-answer",
            _S,
            True,
            "Answers come nearer to the other account's secrets than to secrets never sent.",
        ),
        Rule(
            "PROBE003",
            "over-long-answered",
            _T,
            False,
            "A prompt longer than every stated limit was answered and not refused.",
        ),
        Rule(
            "PROBE004",
            "empty-answer",
            _T,
            False,
            "An answer with status 200 has no text and says that its length was reached: a failure "
            "served as success.",
        ),
        Rule(
            "PROBE005",
            "prompt-count-differs",
            _T,
            False,
            "The answer counts another number of prompt tokens than the prompt has.",
        ),
        Rule(
            "PROBE006",
            "window-not-served",
            _T,
            False,
            "A prompt within the advertised window was refused: less is served than promised.",
        ),
        Rule(
            "PROBE007",
            "over-long-failed",
            _T,
            False,
            "A prompt longer than every stated limit was not refused with 4xx; it failed.",
        ),
        Rule(
            "PROBE008",
            "stream-crossed",
            _C,
            True,
            "An event of a stream carries the tag of another stream.",
        ),
        Rule(
            "PROBE009",
            "answer-name-shared",
            _T,
            False,
            "Two answers, or two parts of one stream, do not keep the names of answers apart.",
        ),
        Rule(
            "PROBE010",
            "cached-prefix-timed",
            _S,
            True,
            "One account's first token comes sooner after a prefix that the other account sent.",
        ),
        Rule(
            "PROBE011",
            "stream-fragments-crossed",
            _S,
            True,
            "Streams hold parts of the tags of other streams more often than chance allows.",
        ),
        Rule(
            "PROBE012",
            "response-shared",
            _C,
            True,
            "An answer to one account is the stored answer to a request of the other account: it "
            "has its name and the time of its making, though both were asked apart.",
        ),
        Rule(
            "PROBE013",
            "answer-disturbed",
            _S,
            False,
            "Answers of one account change while the other sends requests, more often than they "
            "change alone: the cause may be shared memory or only arithmetic that depends on the "
            "batch, so it is no leak by itself.",
        ),
        Rule(
            "PROBE014",
            "answers-coincide",
            _S,
            True,
            "Answers drawn at random begin like the other account's answers to the same request, "
            "and unlike further answers to nearly the same.",
        ),
    )
}
