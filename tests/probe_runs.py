"""Runs a technique of the probe against a toy of a gateway, and settles it."""

import asyncio
import dataclasses
from typing import Any

from probe_kit import Request, endpoint, serving
from probe_toy_gateway import GatewayToy
from sekisho.probe.budget import Cost
from sekisho.probe.canary import Mint
from sekisho.probe.exchange import Outcome
from sekisho.probe.model import TechniqueResult
from sekisho.probe.oracles import settle
from sekisho.probe.techniques.base import Technique

SEED = 20261202


@dataclasses.dataclass
class Done:
    """What was found and spent, every outcome by serial, and what the server got."""

    result: TechniqueResult
    spent: Cost
    log: dict[int, Outcome]
    requests: list[Request]
    halves: list[bytes]

    @property
    def rules(self) -> set[str]:
        return {finding.rule for finding in self.result.findings}

    def sent(self, account: str) -> list[Request]:
        """Of one account, what asks for an answer."""
        posts = [one for one in self.requests if one.method == "POST"]
        return [one for one in posts if one.account == account]


def done(technique: Technique, toy: GatewayToy, **options: Any) -> Done:
    """``options`` are the endpoint's."""
    log: dict[int, Outcome] = {}

    def tell(outcome: Outcome) -> None:
        log[outcome.serial] = outcome

    async def main() -> Done:
        async with (
            serving(toy.speak, toy.half) as server,
            endpoint(server, log=tell, **options) as found,
        ):
            result = await technique.run(found, Mint(SEED))
            [settled] = settle([result]).techniques
            return Done(settled, found.purse.spent, log, server.requests, server.halves)

    return asyncio.run(main())
