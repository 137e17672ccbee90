"""Which opportunity suffers which fault, and what is known of it afterwards."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from sekisho.sim.atlas import ATLAS, Fault, Seam
from sekisho.sim.scenario import Strike


class Strikes:
    """Counts the opportunities at each seam and hands out the strike that falls on one.

    ``fired`` counts per fault the strikes that took effect; ``hit`` names, per request, the faults
    that touched it, for the table of what caught them.
    """

    def __init__(self, strikes: Sequence[Strike]) -> None:
        self.fired: Counter[str] = Counter()
        self.hit: dict[int, list[str]] = defaultdict(list)
        self._left: dict[tuple[Seam, int], Strike] = {}
        for strike in strikes:
            self._left.setdefault((ATLAS[strike.fault].seam, strike.n), strike)
        self._seen: Counter[Seam] = Counter()
        self._seams = {seam for seam, _ in self._left}

    def take(self, seam: Seam) -> tuple[Fault, Strike] | None:
        """The strike on this opportunity, if there is one; the caller says with `fire` whether
        it could take effect."""
        if seam not in self._seams:
            return None
        count = self._seen[seam]
        self._seen[seam] += 1
        strike = self._left.get((seam, count))
        return None if strike is None else (ATLAS[strike.fault], strike)

    def fire(self, name: str, request: int | None = None) -> None:
        """A fault took effect, on this request if it was on one."""
        self.fired[name] += 1
        if request is not None:
            self.hit[request].append(name)

    def postpone(self, seam: Seam, strike: Strike) -> None:
        """The strike cannot take effect here: the next opportunity gets it."""
        self._left.setdefault((seam, self._seen[seam]), strike)
