"""What a report says of the run itself."""

import msgspec

from sekisho.probe.budget import Cost, Prices


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run.

    Attributes:
        started: ISO time, UTC.
        authorised_by: who and when, as given; empty for a host that needs none.
        version: of sekisho.
        spent: of the budget, whatever came of it.
        prices: where they were given, what that is in money.
        self_test: what the controls showed, in a sentence; None where they were not run.
    """

    base_url: str
    model: str
    started: str
    seed: int
    authorised_by: str
    version: str
    spent: Cost
    prices: Prices | None = None
    self_test: str | None = None

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, as a report lists them."""
        spent = (
            f"{self.spent.requests:,} requests, {self.spent.prompt_tokens:,} prompt tokens, "
            f"{self.spent.answer_tokens:,} answer tokens"
        )
        if self.prices is not None:
            spent += f", {self.spent.money(self.prices):.4g} in money"
        return [
            ("endpoint", self.base_url),
            ("model", self.model),
            ("started", self.started),
            ("authorised by", self.authorised_by or "nobody: the host is this machine"),
            ("seed", str(self.seed)),
            ("spent", spent),
            ("self-test", self.self_test or "not run: believe a run only with its controls"),
            ("version", f"sekisho {self.version}"),
        ]
