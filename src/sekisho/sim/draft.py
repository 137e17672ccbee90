"""A scenario while it is being drawn: an ordinary day first, then what each fault needs."""

import random
from dataclasses import dataclass, field

from sekisho.sim.atlas import ATLAS
from sekisho.sim.model import PAGE_SIZE, VOCABULARY
from sekisho.sim.scenario import Ask, Event, Scenario, Shape, Strike

_TENANTS = ("ada", "bob", "cyd")
START_S = 0.4  # the nodes are ready by then
_ASKS_S = 0.06
_BURST_S = 0.002


@dataclass
class Draft:
    """The fields of `Shape` and what the clients do, still open to change.

    ``bursts`` are the seconds at which many ask at once. ``leaving`` is the share of clients that
    leave early, ``sharing`` the share of prompts that begin with one of their tenant's usual
    beginnings. ``answers`` bounds an answer's tokens.
    """

    rng: random.Random
    shape: dict[str, int]
    isolation: str
    wait_max: float
    tenants: list[str]
    bursts: list[float]
    count: int
    answers: tuple[int, int] = (1, 3)
    tails: tuple[int, int] = (1, 60)
    leaving: float = 0.1
    sharing: float = 0.5
    retries: int = 0
    together: bool = False
    same_prompts: bool = False
    extra: list[Ask] = field(default_factory=list)
    strikes: list[Strike] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def finish(self, seed: int, without: list[str]) -> Scenario:
        """Draw the everyday requests and close the scenario."""
        shape = Shape(**self.shape, isolation=self.isolation, wait_max=self.wait_max)
        asks = [*self._everyday(shape), *self.extra]
        asks.sort(key=lambda ask: ask.at)
        return Scenario(
            seed=seed,
            shape=shape,
            asks=asks,
            strikes=self.strikes,
            events=self.events,
            without=without,
        )

    def text(self, length: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(length)]

    def moment(self) -> float:
        """When a client asks, seconds."""
        return round(self.rng.choice(self.bursts) + self.rng.uniform(0.0, _BURST_S), 4)

    def limit(self) -> int:
        """Tokens that every role holds."""
        return min(self.shape["decode_pages"], self.shape["prefill_pages"]) * PAGE_SIZE

    def add(self, fault: str, tokens: list[int], **more: float | str | int) -> None:
        """One more request, which belongs to ``fault``."""
        values = {"at": self.moment(), "tenant": self.tenants[0], "count": 3, **more}
        self.extra.append(Ask(tokens=tokens, fault=fault, **values))  # type: ignore[arg-type]

    def _everyday(self, shape: Shape) -> list[Ask]:
        rng = self.rng
        usual = {
            tenant: [self.text(PAGE_SIZE * rng.randint(1, 3)) for _ in range(2)]
            for tenant in self.tenants
        }
        if self.same_prompts or rng.random() < 0.2:
            usual = dict.fromkeys(self.tenants, usual[self.tenants[0]])
        moment, asks = self.moment(), []
        for _ in range(self.count):
            tenant, count = rng.choice(self.tenants), rng.randint(*self.answers)
            tokens = self.text(rng.randint(*self.tails))
            if rng.random() < self.sharing:
                tokens = rng.choice(usual[tenant]) + tokens
            tokens = tokens[: max(1, self.limit() - count)]
            leaves = round(rng.uniform(0.001, 0.08), 4) if rng.random() < self.leaving else None
            asks.append(
                Ask(
                    at=moment if self.together else self.moment(),
                    tenant=tenant,
                    tokens=tokens,
                    count=min(count, self.limit() - len(tokens)) or 1,
                    temperature=0.7 if rng.random() < 0.1 else 0.0,
                    leaves=leaves,
                    retries=self.retries,
                )
            )
        return asks


def everyday(rng: random.Random) -> Draft:
    """An ordinary deployment and its traffic."""
    shape = {
        "prefill": rng.choice([1, 1, 1, 2, 3]),
        "decode": rng.choice([1, 1, 1, 2]),
        "prefill_pages": rng.randint(10, 30),
        "decode_pages": rng.randint(12, 36),
        "batch_max": rng.randint(4, 12),
        "chunk_tokens": rng.choice([24, 64, 400, 400, 400]),
        "queue_max": 32,
    }
    return Draft(
        rng=rng,
        shape=shape,
        isolation=rng.choice(["standard"] * 7 + ["strict"]),
        wait_max=rng.uniform(2.0, 5.0),
        tenants=list(_TENANTS[: rng.choice([2, 2, 3])]),
        bursts=[START_S + rng.uniform(0.0, _ASKS_S) for _ in range(rng.randint(1, 3))],
        count=rng.randint(16, 36),
    )


def need(draft: Draft, name: str) -> None:
    """Shape the run so that a fault can matter (see `Fault.needs`)."""
    rng, shape = draft.rng, draft.shape
    match name:
        case "abort":
            draft.leaving = 0.6
        case "tight":
            shape["decode"], shape["decode_pages"] = 1, rng.randint(8, 14)
            draft.count += 6
        case "tight-prefill":
            shape["prefill"], shape["prefill_pages"] = 1, rng.randint(6, 10)
            draft.count += 6
        case "hasty":
            draft.wait_max = rng.uniform(0.1, 0.4)
        case "two-decode":
            shape["decode"] = 2
        case "strict":
            draft.isolation = "strict"
        case "chunked":
            shape["chunk_tokens"] = PAGE_SIZE
        case "busy":
            shape["decode"], draft.answers, draft.together = 1, (6, 20), True
        case "shared":
            draft.sharing, draft.isolation = 0.9, "standard"
        case "same-prompts":
            draft.same_prompts, draft.sharing, draft.isolation = True, 0.9, "standard"
        case "retry":
            draft.retries = 3
        case "preempt":
            shape["decode"], shape["decode_pages"] = 1, rng.randint(8, 14)
            shape["batch_max"], draft.answers, draft.tails = 8, (20, 50), (1, 30)
        case "failing":
            draft.strikes += [Strike("sick-link", rng.randrange(8)) for _ in range(3)]
        case "stalled-sibling":
            n = rng.randrange(1, 8)
            draft.strikes += [Strike("running-call", n, 0.3), Strike("sick-link", n + 1)]
        case _:
            raise ValueError(f"fault {name!r} needs something unknown; one of {sorted(ATLAS)}")
