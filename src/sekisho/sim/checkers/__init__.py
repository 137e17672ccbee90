"""Judges of a run, independent of the code they judge. The first finding ends the run."""

from sekisho.sim.scenario import Failure


class FoundError(Exception):
    """A checker has seen what must not be."""

    def __init__(self, checker: str, message: str) -> None:
        super().__init__(f"{checker}: {message}")
        self.failure = Failure(checker, message, 0.0)
