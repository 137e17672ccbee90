"""What is asked of a run, as it lies in the run's folder: enough to do it again, and no key."""

import hashlib
import ipaddress
from datetime import UTC, datetime
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from sekisho import __version__
from sekisho.gate.fetch import parse_url
from sekisho.probe.budget import Budget, Cost
from sekisho.probe.sizes import BUDGETS, LENGTH_MAX, Size, made
from sekisho.probe.techniques import TECHNIQUES, Technique

WINDOW_MAX = 2**26
SEED_MAX = 2**63 - 1
_TEXT_MAX = 200

Accounts: TypeAlias = Literal["two keys", "one key", "no key"]
SAME_ACCOUNT = (
    "both accounts are one here, so that what it may share with itself is not told from a leak"
)


class PlanError(Exception):
    """A run cannot be done as asked; one sentence, without a key."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        techniques: names, in the order in which they run.
        window: what is advertised, in tokens; None where only the endpoint says.
        length_max: no prompt has more tokens.
        authorised_by: who and when; empty for a host that needs none.
        accounts: whether the two differ; with one key or none they do not.
        self_test: the controls run first, and what fails them is not believed.
        started: ISO time, UTC.
    """

    base_url: str
    model: str
    techniques: tuple[str, ...]
    size: Size
    window: int | None
    length_max: int
    budget: Budget
    timeout_s: float
    stop_at_first: bool
    self_test: bool
    seed: int
    authorised_by: str
    accounts: Accounts
    started: str
    version: str

    def made(self) -> list[Technique]:
        """Its techniques, ready to run.

        Raises:
            PlanError: one is not known.
        """
        for name in self.techniques:
            if name not in TECHNIQUES:
                raise PlanError(f"no technique {name!r}; there are {', '.join(TECHNIQUES)}")
        return [made(name, self.size, self.window, self.length_max) for name in self.techniques]

    def cost(self) -> Cost:
        """The most that all of it can cost."""
        return sum((technique.cost() for technique in self.made()), Cost())

    def seed_of(self, technique: str) -> int:
        """Of its own for each technique, so that none depends on which ran before."""
        return int.from_bytes(hashlib.sha256(f"{self.seed}:{technique}".encode()).digest()[:8])

    def again(self, *, accounts: Accounts, authorised_by: str) -> "Plan":
        """The same as a new run; its secrets are new as well (`canary.Mint`).

        Raises:
            PlanError: see `check`.
        """
        found = msgspec.structs.replace(
            self,
            accounts=accounts,
            authorised_by=authorised_by or self.authorised_by,
            started=now(),
            version=__version__,
        )
        found.check()
        return found

    def check(self, *, is_sent: bool = True) -> None:
        """Can it be run, and may it? A plan out of a folder may have been edited.

        Args:
            is_sent: False for a plan that is only looked at, which nobody needs to allow.

        Raises:
            PlanError: it cannot, or nobody is named who allows it.
            ClaimError: the URL cannot be used.
        """
        url = parse_url(self.base_url)
        if not self.model or not self.model.isprintable():
            raise PlanError("the model needs a name that can be printed")
        if is_sent and not is_loopback(url) and not self.authorised_by:
            raise PlanError(
                "this host is not this machine: say who allows it and when, "
                'by --authorised-by "who, when"'
            )
        if self.authorised_by:
            _check_authorised(self.authorised_by)
        if len(set(self.techniques)) < len(self.techniques):
            raise PlanError("a technique is named twice")
        self.made()


def plan(
    base_url: str,
    model: str,
    *,
    seed: int,
    techniques: tuple[str, ...] = (),
    size: Size = "standard",
    window: int | None = None,
    length_max: int | None = None,
    budget: Budget | None = None,
    timeout_s: float = 120.0,
    stop_at_first: bool = False,
    self_test: bool = False,
    authorised_by: str = "",
    accounts: Accounts = "two keys",
    is_sent: bool = True,
) -> Plan:
    """A plan that can be run; by default all techniques, and the budget of the size.

    Args:
        is_sent: False for a plan that is only looked at, which nobody needs to allow.

    Raises:
        PlanError: it cannot, or nobody is named who allows it.
        ClaimError: the URL cannot be used.
    """
    url = parse_url(base_url)
    longest = length_max or max(LENGTH_MAX[size], 2 * (window or 0))
    found = Plan(
        base_url=url,
        model=model,
        techniques=tuple(techniques) or tuple(TECHNIQUES),
        size=size,
        window=window,
        length_max=longest,
        budget=budget or BUDGETS[size],
        timeout_s=timeout_s,
        stop_at_first=stop_at_first,
        self_test=self_test,
        seed=seed,
        authorised_by=authorised_by,
        accounts=accounts,
        started=now(),
        version=__version__,
    )
    found.check(is_sent=is_sent)
    refused = found.budget.refuses(found.cost())
    if is_sent and budget is None and refused:
        raise PlanError(f"{refused}: give a shorter --length-max, or a budget that is meant")
    return found


def is_loopback(url: str) -> bool:
    """Is it this machine? A literal address or ``localhost``; no name is looked up, since who
    answers for a name may say anything."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def now() -> str:
    """ISO time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _check_authorised(text: str) -> None:
    who, comma, when = text.partition(",")
    if not (who.strip() and comma and when.strip()):
        raise PlanError('--authorised-by wants "who, when", with a comma between')
    if len(text) > _TEXT_MAX or not text.isprintable():
        raise PlanError(f"--authorised-by wants one line of at most {_TEXT_MAX} characters")
