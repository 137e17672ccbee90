"""What the gate reads, and what it says. Sizes are in tokens of KV cache unless a name says else.

Every struct is JSON-able as it stands (``msgspec.json.encode``) and never holds a key.
"""

from enum import StrEnum
from typing import Literal, TypeAlias

import msgspec

Role: TypeAlias = Literal["prefill", "decode", "both"]
Engine: TypeAlias = Literal["sekisho", "sglang", "vllm", "llama.cpp", "tgi"]
PrefixScope: TypeAlias = Literal["tenant", "shared", "off", "unknown"]


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    INCONCLUSIVE = "inconclusive"


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """The KV capacity of one replica or data-parallel rank, as it was built.

    Attributes:
        pool_tokens: slots of the pool; no request can hold more, whatever is configured.
        page_size: the pool is given out in pages of so many tokens, at least 1.
        request_max: the engine's own limit for one prompt (SGLang ``max_req_input_len``).
        sequence_max: its limit for prompt and answer together (the context length).
        reserved_tokens: what the engine keeps for itself (vLLM's null block).
    """

    name: str
    pool_tokens: int
    page_size: int
    request_max: int | None = None
    sequence_max: int | None = None
    reserved_tokens: int = 0


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine answered.

    Attributes:
        source: its URL without credentials, or the file that was read.
        version: as the engine states it; empty where it does not.
        advertised: the window that this engine itself states to clients.
        answer_min: tokens of that window that it never takes as a prompt, since they are the
            answer's; at least one.
        prefix_scope: who can hit whose cached prefixes.
        seconds: how long reading took.
    """

    source: str
    engine: Engine
    version: str
    role: Role
    model: str
    ranks: list[Rank]
    advertised: int | None = None
    answer_min: int = 1
    prefix_scope: PrefixScope = "unknown"
    seconds: float = 0.0


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A window that somebody advertises.

    Attributes:
        window: tokens of one request, prompt and answer.
        output_tokens: tokens of answer promised on top of the window; 0 where the window counts
            them (as the context length of vLLM and SGLang does), or nothing is stated.
        source: who says so.
        prompt_max: the longest prompt that is let through to the engine. 0: the window, as
            nothing in front of the engine refuses a prompt that fills it.
        own: an engine says it of itself. It is then its context, which no prompt fills alone.
    """

    model: str
    window: int
    output_tokens: int = 0
    source: str
    prompt_max: int = 0
    own: bool = False


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One broken rule.

    Attributes:
        rule: a key of `rules.RULES`.
        source: the engine, file or option it is about.
        observed, required: the two numbers that were compared.
        report: a public report of the fault, as ``project#number``, or empty.
        waived_until: ISO date up to which it is accepted (inclusive); empty: it is not.
        waived_because: the reason given.
    """

    rule: str
    severity: Severity
    model: str
    source: str
    message: str
    observed: int | None = None
    required: int | None = None
    report: str = ""
    waived_until: str = ""
    waived_because: str = ""


class Unread(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that told nothing usable; ``reason`` is one sentence.

    ``inconclusive``: it did not answer (it may be starting). Else it answered nonsense.
    ``role``: the one it was named for, or empty.
    """

    source: str
    reason: str
    inconclusive: bool
    model: str = ""
    role: Role | Literal[""] = ""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest rank of a role, which decides what the role can serve, and ``because`` of
    which number."""

    model: str
    role: Role
    source: str
    rank: str
    servable: int
    because: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the gate.

    Attributes:
        version: of Sekisho.
        created: ISO time, UTC.
        capacities: the deciding rank of every role of every model.
        advertised: the largest claimed window, by model.
        servable: the longest request that every role holds, by model; absent where a role was
            not read.
    """

    version: str
    created: str
    claims: list[Claim]
    readings: list[Reading]
    unread: list[Unread]
    capacities: list[Capacity]
    advertised: dict[str, int]
    servable: dict[str, int]
    findings: list[Finding]

    def exit_code(self) -> int:
        """0: holds. 1: an error that no waiver covers. 3: no such error, but something could not
        be judged."""
        open_ones = {f.severity for f in self.findings if not f.waived_until}
        if Severity.ERROR in open_ones:
            return 1
        # What was not read was not judged, whatever a waiver says of the finding about it.
        if self.unread or Severity.INCONCLUSIVE in open_ones or not self.capacities:
            return 3
        return 0

    def waived(self) -> int:
        """How many findings a waiver covers."""
        return sum(1 for finding in self.findings if finding.waived_until)


class GateError(Exception):
    """The gate cannot run. One line, fit for the user; never a key."""


class ClaimError(GateError):
    """A catalogue, configuration or option cannot be used."""


class ReadError(Exception):
    """One engine cannot be read; one sentence, never a key.

    ``inconclusive``: see `Unread`.
    """

    def __init__(self, reason: str, *, inconclusive: bool = False) -> None:
        super().__init__(reason)
        self.inconclusive = inconclusive
