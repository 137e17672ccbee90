"""The gate inside ``sekisho serve``: the same judge over the platform's own nodes.

Called with what each node said when it was ready, before the first request is taken, and again
whenever a node joins: its replacement sizes its pool anew.
"""

from collections.abc import Mapping

from sekisho.gate.judge import judge, utc_now
from sekisho.gate.model import Claim, Rank, Reading, Result, Role
from sekisho.gate.policy import Policy

_ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "colocated": "both"}


def check_fleet(model: str, window: int, nodes: Mapping[str, int]) -> Result:
    """Judge ``window`` tokens against ``nodes``: by name, the tokens one request may hold there.

    A name begins with the node's role, as in ``prefill-1``. `refusal` puts the result in words.

    Raises:
        ValueError: a node's name has no role.
    """
    claim = Claim(model=model, window=window, source="window")
    readings = [_reading(model, name, held) for name, held in sorted(nodes.items())]
    # Each node advertises what it holds, so that a margin above one window is not its matter.
    return judge(readings, [], [claim], Policy(now=utc_now(), margin=0.0))


def refusal(result: Result) -> str:
    """Why the platform must not serve, in one line; empty if it may."""
    if result.exit_code() == 0:
        return ""
    said = [f"{f.source}: {f.message}" if f.source else f.message for f in result.findings]
    return "; ".join(said) or "no node was read"


def _reading(model: str, name: str, held: int) -> Reading:
    role = _ROLES.get(name.partition("-")[0])
    if role is None:
        raise ValueError(f"the node {name!r} has no role that is known")
    return Reading(
        source=name,
        engine="sekisho",
        version="",
        role=role,
        model=model,
        ranks=[Rank(name=name, pool_tokens=held, page_size=1, sequence_max=held)],
        prefix_scope="tenant",
    )
