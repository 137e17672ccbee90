"""Requests of which each carries a secret of its own, a tag, that its answer repeats.

So both accounts plant and both ask: an answer that holds a tag of the other account is proof. An
endpoint whose answers do not repeat their own tags could exchange them unseen; the share that
does is the sensitivity.
"""

from collections.abc import Iterable, Mapping, Sequence

from sekisho.probe.canary import Canary
from sekisho.probe.exchange import Answer, Outcome
from sekisho.probe.match import run
from sekisho.probe.model import Finding
from sekisho.probe.oracles import exact

PROMPT_TOKENS = 500
"""More than `prompt` has."""
_REPEATS = 12


def prompt(tag: Canary) -> str:
    """A text that any model continues with its tag, since it has done nothing else so far."""
    line = f"The {tag.kind} is {tag.text}."
    return f"Repeat this line, and write nothing else:\n{line}\n" + f"{line}\n" * _REPEATS


def repeats(answer: Answer, tag: Canary) -> bool:
    """Does the answer hold the whole of its own tag?"""
    return any((hit := run(tag, text)) and hit.whole for text in answer.texts()[:2])


def sensitivity(outcomes: Iterable[Outcome], tags: Mapping[int, Canary]) -> float:
    """The share of answers that repeat their own tag, of those that were sent one."""
    answers = [one for one in outcomes if isinstance(one, Answer) and one.serial in tags]
    own = sum(repeats(answer, tags[answer.serial]) for answer in answers)
    return own / len(answers) if answers else 0.0


def foreign(
    technique: str,
    outcomes: Sequence[Outcome],
    tags: Mapping[int, Canary],
    *,
    rule: str = "PROBE001",
    report: str = "",
) -> list[Finding]:
    """Tags of one account in what the other was sent.

    What an account sent before is no finding in its own answers: a conversation or a cache of its
    own may hold it.

    Args:
        outcomes: of both accounts; those of ``tags`` are among them.
    """
    owners = {outcome.serial: outcome.account for outcome in outcomes}
    found = []
    for account in sorted(set(owners.values())):
        others = {serial: [tag] for serial, tag in tags.items() if owners[serial] != account}
        seen = [outcome for outcome in outcomes if outcome.account == account]
        found += exact(technique, seen, others, rule=rule, report=report)
    return found
