"""What a run may cost, said before it starts and held while it runs."""

import math

import msgspec

_BYTES_PER_TOKEN = 3
"""English has more than four; estimating low would spend more than was allowed."""


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Money for a million tokens, in whatever currency the budget is in."""

    prompt_per_million: float
    answer_per_million: float


class Cost(msgspec.Struct, frozen=True):
    """Of requests that are planned or were sent."""

    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.answer_tokens + other.answer_tokens,
        )

    def times(self, count: int) -> "Cost":
        """The cost of ``count`` of these."""
        return Cost(self.requests * count, self.prompt_tokens * count, self.answer_tokens * count)

    @property
    def tokens(self) -> int:
        """Prompt and answer together."""
        return self.prompt_tokens + self.answer_tokens

    def money(self, prices: Prices) -> float:
        """What a provider bills for it."""
        prompt = self.prompt_tokens * prices.prompt_per_million
        return (prompt + self.answer_tokens * prices.answer_per_million) / 1e6


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The most a run may use.

    Raises:
        ValueError: a limit that is no limit, or money without prices.
    """

    requests_max: int = 2_000
    tokens_max: int = 2_000_000
    concurrency_max: int = 8
    money_max: float | None = None
    prices: Prices | None = None

    def __post_init__(self) -> None:
        if min(self.requests_max, self.tokens_max, self.concurrency_max) < 1:
            raise ValueError("a budget's requests, tokens and concurrency are at least 1")
        amounts = [] if self.money_max is None else [self.money_max]
        if self.prices is not None:
            amounts += [self.prices.prompt_per_million, self.prices.answer_per_million]
        if not all(math.isfinite(amount) and amount >= 0 for amount in amounts):
            raise ValueError("money is a finite number, not below 0")
        if self.money_max is not None and self.prices is None:
            raise ValueError("a budget in money needs the prices of tokens")

    def refuses(self, cost: Cost) -> str:
        """Why ``cost`` is too much, as one sentence; empty where it is not.

        With the sum of a plan's costs this is the dry run.
        """
        if cost.requests > self.requests_max:
            return f"the budget of {self.requests_max:,} requests does not allow {cost.requests:,}"
        if cost.tokens > self.tokens_max:
            return f"the budget of {self.tokens_max:,} tokens does not allow {cost.tokens:,}"
        if self.money_max is not None and self.prices is not None:
            money = cost.money(self.prices)
            if money > self.money_max:
                return f"the budget of {self.money_max:g} does not allow {money:.4g}"
        return ""


class Purse:
    """What was spent of a budget. A request is paid at its highest price before it is sent, and
    what it did not use comes back with its answer."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.spent = Cost()

    def take(self, cost: Cost) -> str:
        """Spend ``cost``; or the sentence why not, and nothing is spent."""
        refused = self.budget.refuses(self.spent + cost)
        if not refused:
            self.spent += cost
        return refused

    def settle(self, taken: Cost, used: Cost) -> None:
        """Of ``taken``, only ``used`` was used; it may be more, where an estimate was low."""
        self.spent += used + taken.times(-1)


def estimate_tokens(text: str) -> int:
    """At least as many tokens as English text has, and one."""
    return max(1, math.ceil(len(text.encode("utf-8", "replace")) / _BYTES_PER_TOKEN))
