"""The gate inside ``sekisho serve``: the same judge over the platform's own nodes.

Called with what each node said when it was ready, before the first request is taken, and again
whenever one joins or goes: its replacement sizes its pool anew.
"""

from collections.abc import Mapping

from sekisho.gate.judge import judge, utc_now
from sekisho.gate.model import Claim, Rank, Reading, Result, Role, Severity
from sekisho.gate.policy import Policy

_ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "colocated": "both"}


def check_fleet(model: str, window: int, nodes: Mapping[str, Rank]) -> Result:
    """Judge ``window`` tokens against ``nodes``: by name, what each can hold.

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
    against = [f for f in result.findings if f.severity is not Severity.WARNING]
    said = [f"{f.source}: {f.message}" if f.source else f.message for f in against]
    return "; ".join(said) or "no node was read"


def role_of(name: str) -> Role:
    """The role that a node's name begins with.

    Raises:
        ValueError: it has none.
    """
    role = _ROLES.get(name.partition("-")[0])
    if role is None:
        raise ValueError(f"the node {name!r} has no role that is known")
    return role


def _reading(model: str, name: str, rank: Rank) -> Reading:
    return Reading(
        source=name,
        engine="sekisho",
        version="",
        role=role_of(name),
        model=model,
        ranks=[rank],
        prefix_scope="tenant",
    )
