"""Liveness: when faults stop, every request ends, quarantine drains, and every role has a node.

Not verified: how soon, beyond a generous bound in simulated time; fairness between tenants.
"""

from collections.abc import Iterable

from sekisho.sim.checkers import FoundError
from sekisho.sim.client import Answer


class Liveness:
    """Looks once, after the last event of a run."""

    name = "liveness"

    def settled(self, answers: Iterable[Answer], busy: Iterable[str], quarantined: int) -> None:
        """The run is over: nothing happens any more, or its time is up."""
        left = [answer.ask for answer in answers if not answer.ended]
        if left:
            raise FoundError(self.name, f"ask(s) {left[:8]} never ended")
        nodes = list(busy)
        if nodes:
            raise FoundError(self.name, f"{nodes} still busy, {quarantined} page(s) in quarantine")
        if quarantined:
            raise FoundError(self.name, f"{quarantined} page(s) stay in quarantine")

    def serving(self, ready: bool) -> None:
        """After the last fault the fleet must come back."""
        if not ready:
            raise FoundError(self.name, "the fleet did not become ready again")
