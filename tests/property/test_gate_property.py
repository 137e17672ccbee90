"""No combination of readings in which some role holds less than a claim ends in 0."""

import datetime

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sekisho.gate.judge import judge
from sekisho.gate.model import Claim, Rank, Reading, Unread
from sekisho.gate.policy import Policy

POLICY = Policy(now=datetime.datetime(2026, 12, 2, tzinfo=datetime.UTC))
sizes = st.integers(1, 400)
limits = st.none() | st.integers(0, 400)

ranks = st.builds(
    Rank,
    name=st.just("r"),
    pool_tokens=sizes,
    page_size=st.integers(1, 64),
    request_max=limits,
    sequence_max=limits,
    reserved_tokens=st.integers(0, 80),
)
readings = st.builds(
    Reading,
    source=st.sampled_from(["a", "b"]),
    engine=st.sampled_from(["sglang", "vllm", "tgi", "llama.cpp", "sekisho"]),
    version=st.sampled_from(["0.5.24", "0.32.0", "0.5.19", "", "x"]),
    role=st.sampled_from(["prefill", "decode", "both"]),
    model=st.sampled_from(["m", "n", ""]),
    ranks=st.lists(ranks, max_size=3),
    advertised=st.none() | sizes,
    answer_min=st.integers(1, 8),
    prefix_scope=st.sampled_from(["tenant", "shared", "off", "unknown"]),
)
claims = st.builds(
    Claim,
    model=st.sampled_from(["m", "n"]),
    window=sizes,
    output_tokens=st.integers(0, 100),
    source=st.just("c"),
    prompt_max=st.just(0) | sizes,
)
unreads = st.builds(
    Unread,
    source=st.just("u"),
    reason=st.just("slow"),
    inconclusive=st.booleans(),
    model=st.sampled_from(["", "m"]),
)


def held(rank: Rank, role: str, claim: Claim, prompt: int) -> bool:
    """The claim, one token at a time: can a request of it be placed and is it let in? ``prompt``:
    what somebody who knows states for all claims; else it is each claim's own, or its window."""
    total = claim.window + (0 if role == "prefill" else claim.output_tokens)
    pages_needed = -(-total // rank.page_size)
    pages_given = max(0, rank.pool_tokens - rank.reserved_tokens) // rank.page_size
    placed = pages_needed <= pages_given
    short_enough = rank.sequence_max is None or total <= rank.sequence_max
    longest = prompt or claim.prompt_max or claim.window
    let_in = rank.request_max is None or longest <= rank.request_max
    return placed and short_enough and let_in


@given(st.lists(readings, max_size=4), st.lists(claims, max_size=3), st.lists(unreads, max_size=1))
def test_whatever_holds_less_than_is_claimed_is_never_a_pass(
    read: list[Reading], claimed: list[Claim], unread: list[Unread]
) -> None:
    result = judge(read, unread, claimed, POLICY)
    every = result.claims
    holds = bool(read) and not unread
    for model in {c.model for c in every} | {r.model for r in read}:
        mine = [r for r in read if r.model == model]
        about = [c for c in every if c.model == model]
        roles = {r.role for r in mine}
        prompt = max((c.prompt_max for c in about if not c.own), default=0)
        holds &= bool(about) and ("both" in roles or {"prefill", "decode"} <= roles)
        for reading in mine:
            holds &= bool(reading.ranks)
            holds &= all(held(k, reading.role, c, prompt) for k in reading.ranks for c in about)
    if not holds:
        assert result.exit_code() != 0
    elif not {f.rule for f in result.findings} & {"GATE007"}:
        assert result.exit_code() == 0


@given(st.lists(readings, min_size=1, max_size=4), st.lists(claims, min_size=1, max_size=2))
def test_a_smaller_pool_never_makes_a_failing_deployment_pass(
    read: list[Reading], claimed: list[Claim]
) -> None:
    before = judge(read, [], claimed, POLICY).exit_code()
    smaller = [
        structs.replace(r, ranks=[structs.replace(k, pool_tokens=1) for k in r.ranks]) for r in read
    ]
    after = judge(smaller, [], claimed, POLICY).exit_code()
    assert after != 0 or before == 0


@given(readings, st.integers(2, 400), st.data())
def test_an_engines_context_loosens_nobody_elses_claim(
    reading: Reading, window: int, data: st.DataObject
) -> None:
    prompts = data.draw(st.integers(max(1, window - 9), window - 1))
    rank = Rank(name="r", pool_tokens=10_000, page_size=1, request_max=prompts)
    stock = structs.replace(reading, model="m", role="both", ranks=[rank], advertised=window)
    own = {f.rule for f in judge([stock], [], [], POLICY).findings}
    assert ("GATE001" not in own) is (prompts >= window - stock.answer_min)
    promised = [Claim(model="m", window=window, source="c")]
    assert "GATE001" in {f.rule for f in judge([stock], [], promised, POLICY).findings}
