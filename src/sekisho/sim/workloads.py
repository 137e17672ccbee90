"""Faults that are requests: what clients send, each after the report that names it."""

from collections.abc import Callable

from sekisho.sim.draft import START_S, Draft
from sekisho.sim.model import PAGE_SIZE, VOCABULARY


def _overlong(draft: Draft, name: str) -> None:
    """Longer than any role holds: the incident's own request."""
    longest = max(draft.shape["decode_pages"], draft.shape["prefill_pages"]) * PAGE_SIZE
    draft.add(name, draft.text(longest + draft.rng.randint(1, 60)))


def _over_prefill(draft: Draft, name: str) -> None:
    """Decode holds it, prefill does not."""
    draft.shape["decode_pages"] = draft.shape["prefill_pages"] + draft.rng.randint(3, 8)
    draft.add(name, draft.text(draft.shape["prefill_pages"] * PAGE_SIZE + 2))


def _flood(draft: Draft, name: str) -> None:
    draft.shape["queue_max"], draft.shape["batch_max"] = 6, 3
    moment = draft.moment()
    for _ in range(40):
        draft.add(name, draft.text(20), at=moment, leaves=0.5)


def _abort_early(draft: Draft, name: str) -> None:
    """Pages are reserved, the client leaves before they are filled, the same prompt follows."""
    prompt = draft.text(3 * PAGE_SIZE + 5)
    for turn in range(4):
        leaves = {"leaves": draft.rng.uniform(0.001, 0.02)} if turn < 3 else {}
        draft.add(name, prompt, at=START_S + 0.02 * turn, **leaves)


def _burst_of_equals(draft: Draft, name: str) -> None:
    prompt, moment = draft.text(3 * PAGE_SIZE), draft.moment()
    for _ in range(5):
        draft.add(name, prompt, at=moment)


def _churn(draft: Draft, name: str) -> None:
    """Many short requests of all sizes through few pages."""
    draft.shape["decode_pages"], draft.shape["prefill_pages"] = 10, 10
    for _ in range(16):
        tenant = draft.rng.choice(draft.tenants)
        draft.add(name, draft.text(draft.rng.randint(1, 90)), tenant=tenant)


def _twins(draft: Draft, name: str) -> None:
    """The same text at the same moment from everybody."""
    prompt, moment = draft.text(2 * PAGE_SIZE + 3), draft.moment()
    for tenant in draft.tenants * 2:
        draft.add(name, prompt, at=moment, tenant=tenant)


def _ask_again(draft: Draft, name: str) -> None:
    """A client leaves and sends the same again while the first is still being answered."""
    prompt = draft.text(4 * PAGE_SIZE)
    for turn in range(3):
        draft.add(name, prompt, at=START_S + 0.01 * turn, leaves=0.012 if turn < 2 else 9.0)


def _cancel_retry(draft: Draft, name: str) -> None:
    """Four share a beginning, two leave after 15 and 19 ms and come again, one has nothing to do
    with them."""
    prefix = draft.text(4 * PAGE_SIZE)
    for leaves in (0.015, 0.019, 9.0, 9.0):
        prompt = prefix + draft.text(5)
        draft.add(name, prompt, at=START_S, leaves=leaves, count=6)
        if leaves < 1:
            draft.add(name, prompt, at=START_S + leaves + 0.002, count=6)
    draft.add(name, draft.text(70), at=START_S, tenant=draft.tenants[-1], count=6)


def _colliding(draft: Draft, name: str) -> None:
    """Two texts that a polynomial hash of base 31 cannot tell apart."""
    prompt = draft.text(2 * PAGE_SIZE)
    prompt[3], prompt[4] = 10, 200
    other = list(prompt)
    other[3], other[4] = prompt[3] + 1, prompt[4] - 31
    for turn, text in enumerate((prompt, other, prompt, other)):
        tenant = draft.tenants[turn // 2 % 2]
        draft.add(name, [*text, turn], at=START_S + 0.03 * turn, tenant=tenant)


def _framing(draft: Draft, name: str) -> None:
    """Tenants whose names run into the model's name when they are joined without framing."""
    draft.tenants += ["stand", "stand-in", "stand\x00-in"]
    prompt = draft.text(2 * PAGE_SIZE + 1)
    for turn, tenant in enumerate(draft.tenants[-3:]):
        draft.add(name, prompt, at=START_S + 0.03 * turn, tenant=tenant)


def _one_token_apart(draft: Draft, name: str) -> None:
    """Prompts that differ in one token of their first page."""
    prompt = draft.text(2 * PAGE_SIZE + 1)
    for turn in range(6):
        text = list(prompt)
        text[7] = (text[7] + turn) % VOCABULARY
        draft.add(name, text, at=START_S + 0.02 * turn, tenant=draft.tenants[turn % 2])


def _a_a_b_a_a(draft: Draft, name: str) -> None:
    prompt = draft.text(3 * PAGE_SIZE)
    for turn, tenant in enumerate([0, 0, 1, 0, 0]):
        draft.add(name, prompt, at=START_S + 0.03 * turn, tenant=draft.tenants[tenant], count=5)


def _eviction(draft: Draft, name: str) -> None:
    """More beginnings than the cache holds, each in use while others push it out."""
    prefixes = [draft.text(2 * PAGE_SIZE) for _ in range(5)]
    for turn in range(10):
        prompt = prefixes[turn % 5] + draft.text(4)
        draft.add(name, prompt, at=START_S + 0.012 * turn, count=8)


def _preempt(draft: Draft, name: str) -> None:
    """Nothing beyond what the fault needs: the pool is too small for the answers."""
    draft.add(name, draft.text(20), count=40, at=START_S)


WORKLOADS: dict[str, Callable[[Draft, str], None]] = {
    "overlong": _overlong,
    "over-prefill": _over_prefill,
    "flood": _flood,
    "abort-early": _abort_early,
    "burst-of-equals": _burst_of_equals,
    "churn": _churn,
    "twins": _twins,
    "ask-again": _ask_again,
    "cancel-retry": _cancel_retry,
    "colliding": _colliding,
    "framing": _framing,
    "one-token-apart": _one_token_apart,
    "a-a-b-a-a": _a_a_b_a_a,
    "eviction": _eviction,
    "preempt": _preempt,
}
