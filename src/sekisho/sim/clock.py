"""Simulated time, and ordered channels through it."""

import heapq
import random
from collections.abc import Callable

Action = Callable[[], None]

# A message between processes of one machine, seconds: mostly short, now and then very late.
_LATENCY = (0.0002, 0.004)
_LATENCY_SLOW = (0.02, 0.3)
_SLOW_SHARE = 0.03


class Clock:
    """Runs actions in the order of their times; equal times in the order they were given."""

    def __init__(self) -> None:
        self.now = 0.0
        self._count = 0
        self._queue: list[tuple[float, int, Action]] = []

    def at(self, when: float, action: Action) -> None:
        """Run ``action`` at ``when``, or now if that has passed."""
        self._count += 1
        heapq.heappush(self._queue, (max(when, self.now), self._count, action))

    def after(self, delay: float, action: Action) -> None:
        self.at(self.now + delay, action)

    def next(self) -> bool:
        """Run the next action; False if there is none."""
        if not self._queue:
            return False
        self.now, _, action = heapq.heappop(self._queue)
        action()
        return True


class Network:
    """Channels between processes: reliable and in order while both ends live, as ZeroMQ over ipc.

    Each channel draws its delays from a generator of its own, so that traffic on one does not
    change the delays of another.
    """

    def __init__(self, clock: Clock, seed: int) -> None:
        self._clock = clock
        self._seed = seed
        self._last: dict[tuple[str, str], float] = {}
        self._random: dict[tuple[str, str], random.Random] = {}

    def send(self, source: str, target: str, deliver: Action, extra: float = 0.0) -> None:
        """``deliver`` runs when the message arrives, never before an earlier one of this channel.

        Whether the target still lives then is for ``deliver`` to see. ``extra`` delays it, and
        what comes behind it.
        """
        channel = source, target
        rng = self._random.get(channel)
        if rng is None:
            rng = self._random[channel] = random.Random(f"{self._seed}:{source}>{target}")
        span = _LATENCY_SLOW if rng.random() < _SLOW_SHARE else _LATENCY
        arrival = self._clock.now + extra + span[0] + rng.random() * (span[1] - span[0])
        arrival = max(arrival, self._last.get(channel, 0.0))
        self._last[channel] = arrival
        self._clock.at(arrival, deliver)
