"""N-th failure loops: fail the first point of a scenario, then the second, until it runs untouched.

The device is SQLite's anomaly testing: exhaustive over one failure in one scenario, where random
faults are not. Each point is reached in the real code, over real pools, transports and databases.
"""

import sqlite3
from collections.abc import Callable
from typing import Any

POINTS_MAX = 2000


class Nth:
    """Counts the points of one kind that a scenario passes, and strikes at the n-th."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.passed = 0
        self.over = False

    def strikes(self) -> bool:
        """Called at every point; True at the n-th alone, and never once the scenario is over."""
        if self.over:
            return False
        self.passed += 1
        return self.passed == self.n

    @property
    def fired(self) -> bool:
        return self.passed >= self.n


def fail_each(run: Callable[[Nth], None]) -> int:
    """Run the scenario with its first, second, … point failing; returns how many points it has.

    ``run`` makes everything anew, strikes where `Nth.strikes` says so, and checks what must hold.
    """
    for n in range(1, POINTS_MAX):
        nth = Nth(n)
        try:
            run(nth)
        except BaseException as error:
            error.add_note(f"at point {n}")
            raise
        if not nth.fired:
            return n - 1
    raise AssertionError(f"more than {POINTS_MAX} points: the scenario does not end")


def failing_sqlite(nth: Nth, too_late: bool) -> Callable[..., sqlite3.Connection]:
    """A ``sqlite3.connect`` whose n-th statement or commit fails, in a real database.

    ``too_late``: it takes effect and fails all the same, as when an acknowledgement is lost.
    """

    def strike(act: Callable[..., Any], *arguments: Any) -> Any:
        struck = nth.strikes()
        done = act(*arguments) if too_late or not struck else None
        if struck:
            raise sqlite3.OperationalError("disk I/O error")
        return done

    class Cursor(sqlite3.Cursor):
        def execute(self, *arguments: Any) -> Any:
            return strike(super().execute, *arguments)

        def executemany(self, *arguments: Any) -> Any:
            return strike(super().executemany, *arguments)

    class Connection(sqlite3.Connection):
        def cursor(self, *_: Any) -> Any:
            return super().cursor(Cursor)

        def commit(self) -> None:
            strike(super().commit)

    real = sqlite3.connect

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        made: sqlite3.Connection = real(*arguments, **{**options, "factory": Connection})
        return made

    return connect
