"""Runs one scenario to its end, or to the first thing that a checker sees."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from sekisho.sim.atlas import ATLAS, Seam
from sekisho.sim.checkers import FoundError
from sekisho.sim.checkers.interference import Interference
from sekisho.sim.client import Answer, Client
from sekisho.sim.cluster import Cluster
from sekisho.sim.scenario import Ask, Event, Failure, Scenario

_LIMIT_S = 600.0
_AGAIN_S = 0.3


@dataclass
class Result:
    """``fired``: strikes that took effect, by fault. ``caught``: (fault, how its request ended).
    ``digest`` names the whole run: equal digests, equal runs."""

    failure: Failure | None = None
    fired: Counter[str] = field(default_factory=Counter)
    caught: Counter[tuple[str, str]] = field(default_factory=Counter)
    handoffs: int = 0
    requests: int = 0
    answers: list[Answer] = field(default_factory=list)
    digest: str = ""


def run(
    scenario: Scenario, trace: Callable[[str], None] | None = None, alone: bool = False
) -> Result:
    """Everything that the scenario says, on the production code.

    ``trace`` gets a line for everything that happens. ``alone``: each tenant's requests also run
    without the others' and without faults, and their answers are compared.
    """
    result = _Run(scenario, trace).run()
    if alone and result.failure is None:
        result.failure = _compare_alone(scenario, result.answers)
    return result


def _compare_alone(scenario: Scenario, together: list[Answer]) -> Failure | None:
    for tenant in sorted({ask.tenant for ask in scenario.asks}):
        asks = [ask if ask.tenant == tenant else None for ask in scenario.asks]
        part = msgspec.structs.replace(scenario, strikes=[], events=[])
        solo = _Run(part, None, asks).run()
        if solo.failure is not None:
            return solo.failure
        try:
            Interference().compare(tenant, together, solo.answers)
        except FoundError as found:
            return found.failure
    return None


class _Run:
    def __init__(
        self,
        scenario: Scenario,
        trace: Callable[[str], None] | None,
        asks: Sequence[Ask | None] = (),
    ) -> None:
        self._scenario = scenario
        self._asks = asks or scenario.asks
        self._cluster = Cluster(scenario, trace)
        self._clients: list[Client] = []
        self._live: set[int] = set()

    def run(self) -> Result:
        cluster, result = self._cluster, Result()
        for index, ask in enumerate(self._asks):
            if ask is None:
                continue
            cluster.clock.at(ask.at, partial(self._ask, index, ask, ask.retries))
        for event in self._scenario.events:
            cluster.clock.at(event.at, partial(self._befall, event))
        try:
            while cluster.clock.now < _LIMIT_S and cluster.clock.next():
                pass
            self._judge()
        except FoundError as found:
            result.failure = msgspec.structs.replace(found.failure, at=cluster.clock.now)
        result.fired = cluster.strikes.fired
        result.handoffs = cluster.handoffs
        result.answers = [client.answer for client in self._clients]
        result.requests = len(self._clients)
        self._attribute(result)
        result.digest = self._digest(result)
        return result

    def _ask(self, index: int, ask: Ask, retries: int) -> None:
        cluster = self._cluster
        client = Client(index, ask, self._live, lambda: self._ended(client, retries))
        self._clients.append(client)
        number = cluster.roster.open(ask.tenant, ask.tokens, client.params, client.deliver)
        client.answer.number = number
        cluster.judges.asked(number, len(ask.tokens), ask.count)
        if ask.fault and ATLAS[ask.fault].effect != "preempt":
            cluster.strikes.fire(ask.fault, number)
        if ask.leaves is not None:
            cluster.clock.after(ask.leaves, lambda: self._leave(client))

    def _leave(self, client: Client) -> None:
        client.leave()
        self._cluster.roster.close(client.answer.number)

    def _ended(self, client: Client, retries: int) -> None:
        answer = client.answer
        if answer.status == 503 and retries:
            ask, index = client.ask, answer.ask
            self._cluster.clock.after(_AGAIN_S, lambda: self._ask(index, ask, retries - 1))

    def _befall(self, event: Event) -> None:
        """A fault of a process or of its clock."""
        cluster, effect = self._cluster, ATLAS[event.fault].effect
        process = cluster.in_slot(event.slot)
        if process is None:
            return
        cluster.strikes.fire(event.fault)
        match effect:
            case "kill":
                cluster.kill(process)
            case "kill-keep":
                cluster.kill(process, keep_memory=True)
            case "freeze":
                process.busy_until = cluster.clock.now + event.amount
            case "jump":
                process.ahead += event.amount
                cluster.wake(process)

    def _judge(self) -> None:
        """After the last event."""
        cluster, judges = self._cluster, self._cluster.judges
        pools = [process.pool.counts() for process in cluster.processes.values()]
        quarantined = sum(counts["quarantined"] for counts in pools)
        judges.liveness.settled(
            (client.answer for client in self._clients), cluster.busy(), quarantined
        )
        judges.liveness.serving(cluster.roster.ready())
        for process in cluster.processes.values():
            judges.conservation.settled(process.memory, process.pool, process.pages.cached)
        for client in self._clients:
            answer, ask = client.answer, client.ask
            judges.interference.ended(answer, ask)
            servable = judges.servable(len(ask.tokens), ask.count)
            judges.truth.ended(answer, ask, cluster.said.get(answer.number), servable)

    def _attribute(self, result: Result) -> None:
        """How the requests that a fault touched came to their end, and the fleet where it was no
        request's."""
        cluster = self._cluster
        for fault, count in cluster.strikes.fired.items():
            if ATLAS[fault].seam is Seam.EVENT and result.failure is None:
                result.caught[fault, "all pages back, fleet ready again"] += count
            elif ATLAS[fault].seam is Seam.KEY and cluster.judges.halted:
                result.caught[fault, "node halted"] += cluster.judges.halted
        ends = {answer.number: answer for answer in result.answers}
        for request, faults in cluster.strikes.hit.items():
            answer = ends.get(request)
            if answer is None or not answer.ended:
                continue
            kind = cluster.judges.evidence_of.get(request)
            end = "answered rightly" if answer.served else f"{answer.status} {answer.code}"
            for fault in faults:
                result.caught[fault, f"{end} ({kind})" if kind else end] += 1

    def _digest(self, result: Result) -> str:
        whole = [
            repr(result.failure),
            *(repr(answer) for answer in result.answers),
            repr(sorted(result.fired.items())),
            repr(self._cluster.clock.now),
        ]
        return hashlib.blake2b("\n".join(whole).encode(), digest_size=8).hexdigest()
