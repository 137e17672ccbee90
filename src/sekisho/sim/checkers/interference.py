"""Non-interference: what a tenant is told is what he would be told alone.

The expected answer is computed from the prompt, without pages, nodes or other requests; for a share
of the runs each tenant's requests also run alone and are compared.

Not verified: when a token arrives; how many prompt tokens came from the cache (other tenants'
traffic may evict them); answers with a temperature, except against the run alone.
"""

from collections.abc import Sequence

from sekisho.sim.checkers import FoundError
from sekisho.sim.client import Answer
from sekisho.sim.model import answer as expected_answer
from sekisho.sim.scenario import Ask


class Interference:
    """Compares answers; remembers nothing."""

    name = "interference"

    def ended(self, answer: Answer, ask: Ask) -> None:
        """Every token of a greedy answer, whole or cut off, must be the expected one."""
        if ask.temperature > 0 or not answer.tokens:
            return
        expected = expected_answer(ask.tokens, len(answer.tokens))
        if answer.tokens != expected:
            at = next(i for i, t in enumerate(answer.tokens) if t != expected[i])
            raise FoundError(
                self.name,
                f"request {answer.number} of {answer.tenant}: token {at} is {answer.tokens[at]}, "
                f"alone it is {expected[at]}",
            )

    def compare(self, tenant: str, together: Sequence[Answer], alone: Sequence[Answer]) -> None:
        """The same tenant's answers in both runs; one cut off must be a beginning of the other."""
        solo = {answer.ask: answer for answer in alone}
        for answer in together:
            if answer.tenant != tenant or answer.ask not in solo:
                continue
            one, two = answer.tokens, solo[answer.ask].tokens
            count = min(len(one), len(two))
            if one[:count] != two[:count]:
                raise FoundError(
                    self.name, f"ask {answer.ask} of {tenant} differs from its run alone"
                )
