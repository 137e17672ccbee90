"""The keeper: pages that another engine chooses, what they must carry, and whose they are."""

from collections.abc import Callable

import numpy as np
import pytest

from guard_kit import LAYOUT, SIZE, computed, new_keeper, offered, pages, prompt, sent
from sekisho.core.errors import LocalOwnershipError
from sekisho.core.ledger import State
from sekisho.core.memory import ORDINAL_WORD, Words
from sekisho.core.page import chain, chain_root
from sekisho.guard import keeper as module

FILLED = np.uint64(1 << 32)

# -- pages


def test_a_page_that_is_handed_out_twice_stays_its_first_owners() -> None:
    keeper = new_keeper()
    first, second = keeper.open("first", "a"), keeper.open("second", "b")
    keeper.claim(first, pages(3, 4))
    before = keeper.owner(4)
    with pytest.raises(LocalOwnershipError, match="illegal for a page here: grant"):
        keeper.claim(second, pages(5, 4))
    assert keeper.owner(4) == before, "a refused claim changed the evidence"
    assert second.fresh == []
    assert keeper.ledger.state_of(5) is State.FREE
    assert keeper.ledger.serials_of(pages(4)).tolist() == [first.lease.serial]


def test_a_page_comes_back_once() -> None:
    keeper = new_keeper()
    keeper.claim(keeper.open("r", "a"), pages(1, 2))
    assert keeper.release(pages(2, 1)).tolist() == [2, 1]
    with pytest.raises(LocalOwnershipError, match="no holder"):
        keeper.release(pages(1))
    keeper.ledger.check_integrity()


@pytest.mark.parametrize("page", [-1, 12, 2**40])
def test_pages_that_do_not_exist_are_refused(page: int) -> None:
    keeper = new_keeper(12)
    holding = keeper.open("r", "a")
    with pytest.raises(LocalOwnershipError, match="out of range"):
        keeper.claim(holding, pages(1, page))
    with pytest.raises(LocalOwnershipError, match="out of range"):
        keeper.release(pages(page))
    assert keeper.owner(page) == "no page of this pool"
    assert keeper.ledger.free_count == 12


def test_a_page_with_a_writer_waits_for_it() -> None:
    keeper = new_keeper()
    holding = offered(keeper, "a", prompt(40), pages(1, 2, 3))
    pin = keeper.ledger.pin(pages(1, 2, 3))
    assert keeper.release(pages(1, 2, 3)).tolist() == []
    assert keeper.quarantined() == 3
    with pytest.raises(LocalOwnershipError, match="illegal"):
        keeper.claim(keeper.open("next", "b"), pages(2))
    keeper.close(holding)
    assert sorted(keeper.ledger.settle(pin).tolist()) == [1, 2, 3]
    keeper.claim(keeper.open("next", "b"), pages(2))


def test_a_flush_leaves_what_a_writer_may_still_reach() -> None:
    keeper = new_keeper()
    keeper.claim(keeper.open("r", "a"), pages(1, 2, 3))
    pin = keeper.ledger.pin(pages(2))
    assert keeper.reset().tolist() == [2]
    assert keeper.ledger.counts() == {"free": 11, "leased": 0, "sealed": 0, "quarantined": 1}
    assert keeper.reset().tolist() == [2]
    assert keeper.ledger.settle(pin).tolist() == [2]


def test_an_ended_request_is_given_nothing() -> None:
    keeper = new_keeper()
    holding = keeper.open("r", "a")
    keeper.close(holding)
    with pytest.raises(LocalOwnershipError, match="not open"):
        keeper.claim(holding, pages(1))


# -- the hand-off: expect, verify


@pytest.mark.parametrize("length", [1, 16, 17, 40, 48])
@pytest.mark.parametrize("scope", ["", "a"])
def test_what_was_offered_and_arrived_whole_is_found_whole(length: int, scope: str) -> None:
    keeper = new_keeper()
    row = pages(5, 2, 9)[: LAYOUT.pages_for(length)]
    holding = offered(keeper, scope, prompt(length), row)
    assert len(keeper.verify([holding])[0]) == len(row), "a page that nobody wrote is no page"
    keeper.headers.words[row] = sent(scope, prompt(length), holding)
    assert keeper.verify([holding]) == {}


def test_an_offer_erases_what_the_last_owner_left() -> None:
    keeper = new_keeper()
    old = computed(keeper, "a", prompt(32), pages(5, 2))
    keeper.release(pages(5, 2))
    keeper.close(old)
    holding = offered(keeper, "a", prompt(32), pages(5, 2))
    assert {e.kind for e in keeper.verify([holding])[0]} == {"unwritten"}


def test_pages_and_tokens_of_an_offer_must_agree() -> None:
    keeper = new_keeper()
    holding = keeper.open("r", "a")
    keeper.claim(holding, pages(1, 2))
    with pytest.raises(LocalOwnershipError, match="wrong page count"):
        keeper.expect(holding, prompt(16))


def foreign_lease(words: Words) -> None:
    words[1, 2] += np.uint64(1)


def other_pool(words: Words) -> None:
    words[1, 1] += np.uint64(1)


def one_of_sixteen(words: Words) -> None:
    words[0, ORDINAL_WORD] = 0 | 1 << 32


def last_token_lost(words: Words) -> None:
    words[2, ORDINAL_WORD] -= FILLED


def pages_exchanged(words: Words) -> None:
    words[[0, 1]] = words[[1, 0]]


def never_written(words: Words) -> None:
    words[1:] = 0


def other_shape(words: Words) -> None:
    words[0, 0] ^= np.uint64(1 << 40)


def other_text(words: Words) -> None:
    words[2, 4] ^= np.uint64(1)


FAULTS: list[tuple[Callable[[Words], None], str, list[int]]] = [
    (foreign_lease, "foreign", [2]),  # sglang#24527: a late write of another request
    (other_pool, "foreign", [2]),  # vllm#52234: a peer from before a restart
    (one_of_sixteen, "short", [5]),  # sglang#30233: one token of a page is no page
    (last_token_lost, "short", [9]),
    (pages_exchanged, "misplaced", [5, 2]),  # sglang PR#31471
    (never_written, "unwritten", [2, 9]),  # sglang#30233: one page sent where three were reserved
    (other_shape, "layout", [5]),  # dynamo#14416
    (other_text, "wrong_text", [9]),  # sglang PR#37058
]


@pytest.mark.parametrize(("fault", "kind", "at"), FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_what_arrived_otherwise_is_found(
    fault: Callable[[Words], None], kind: str, at: list[int]
) -> None:
    keeper = new_keeper()
    neighbour = computed(keeper, "b", prompt(20, 3), pages(1, 3))
    keeper.keep(neighbour, prompt(20, 3))
    holding = offered(keeper, "a", prompt(40), pages(5, 2, 9))
    words = sent("a", prompt(40), holding)
    fault(words)
    keeper.headers.words[pages(5, 2, 9)] = words
    found = keeper.verify([neighbour, holding])
    assert list(found) == [1], "by place in the batch, and the neighbour is sound"
    assert [(e.kind, e.page) for e in found[1]] == [(kind, page) for page in at]
    assert all("leased of request of a" in e.found for e in found[1])


def test_another_scopes_text_is_not_this_ones_though_it_is_the_same() -> None:
    keeper = new_keeper()
    holding = offered(keeper, "a", prompt(32), pages(1, 2))
    keeper.headers.words[pages(1, 2)] = sent("b", prompt(32), holding)
    assert [e.kind for e in keeper.verify([holding])[0]] == ["wrong_text"] * 2


def test_a_read_of_other_pages_is_judged_as_it_was_read() -> None:
    keeper = new_keeper()
    holding = offered(keeper, "a", prompt(32), pages(1, 2))
    keeper.headers.words[pages(1, 2)] = sent("a", prompt(32), holding)
    assert keeper.verify([holding], [pages(1, 2)]) == {}
    assert [e.kind for e in keeper.verify([holding], [pages(2, 1)])[0]] == ["misplaced"] * 2
    (short,) = keeper.verify([holding], [pages(1)])[0]
    assert (short.kind, short.expected, short.found) == ("length", "2 pages", "1 pages")


# -- growth


def test_a_grown_request_vouches_for_every_page_it_filled() -> None:
    keeper = new_keeper()
    tokens = prompt(60)
    holding = offered(keeper, "a", tokens[:30], pages(5, 2))
    keeper.headers.words[pages(5, 2)] = sent("a", tokens[:30], holding)
    for written, page in ((32, 7), (48, 3)):
        keeper.claim(holding, pages(page))
        keeper.keep(holding, tokens[:written])
        assert holding.fresh == []
        assert keeper.verify([holding]) == {}
    assert holding.table.pages.tolist() == [5, 2, 7, 3]
    expected = chain(chain_root("a", "m"), tokens[:48], SIZE)
    assert [holding.table.digest_at(i) for i in range(3)] == expected
    assert keeper.headers.words[[5, 2, 7], 4:6].tobytes() == b"".join(expected)


def test_a_page_that_comes_before_the_last_one_is_full_is_refused() -> None:
    keeper = new_keeper()
    holding = offered(keeper, "a", prompt(30), pages(5, 2))
    keeper.claim(holding, pages(7))
    with pytest.raises(LocalOwnershipError, match="only follow full pages"):
        keeper.keep(holding, prompt(31))


def test_growth_does_not_repair_a_header_that_somebody_wrote() -> None:
    keeper = new_keeper()
    holding = offered(keeper, "a", prompt(30), pages(5, 2))
    keeper.headers.words[pages(5, 2)] = sent("a", prompt(30), holding)
    keeper.headers.words[2, 2] += np.uint64(1)  # sglang#24527: it lands while decode runs
    keeper.claim(holding, pages(7))
    keeper.keep(holding, prompt(32))
    assert [(e.kind, e.page) for e in keeper.verify([holding])[0]] == [("foreign", 2)]


# -- rows


def test_a_row_that_leads_elsewhere_is_found_and_named() -> None:
    keeper = new_keeper()
    old = computed(keeper, "a", prompt(16), pages(4))
    keeper.release(pages(4))
    keeper.close(old)
    neighbour = keeper.open("neighbour", "b")
    keeper.claim(neighbour, pages(4, 6))
    holding = offered(keeper, "a", prompt(48), pages(5, 2, 9))
    assert keeper.misdirected(holding, pages(5, 2, 9)) == ()
    (row,) = keeper.misdirected(holding, pages(5, 4, 9))  # sglang PR#31471
    assert (row.kind, row.page, row.expected) == ("row", 4, "page 2")
    assert row.found == "leased of neighbour, before of request of a, ordinal 0"
    assert [e.page for e in keeper.misdirected(holding, pages(2, 5, 9))] == [2, 5]
    (free,) = keeper.misdirected(holding, pages(5, 2, 11))  # mini-sglang PR#142
    assert free.found == "free of -, before of -, ordinal 0"
    (outside,) = keeper.misdirected(holding, pages(5, 2, 99))
    assert outside.found == "no page of this pool"
    (length,) = keeper.misdirected(holding, pages(5, 2))
    assert (length.kind, length.found) == ("length", "2 pages")


def test_names_are_kept_for_the_last_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_NAMES_MAX", 2)
    keeper = new_keeper()
    for page, name in enumerate(("first", "second", "third")):
        keeper.claim(keeper.open(name, "a"), pages(page))
    assert [keeper.owner(page)[:12] for page in range(3)] == [
        "leased of -,",
        "leased of se",
        "leased of th",
    ]


# -- prefixes that are shared within a scope


def test_a_prefix_of_the_same_scope_is_shared() -> None:
    keeper = new_keeper()
    computed(keeper, "a", prompt(40), pages(1, 2, 3))
    reader = keeper.open("reader", "a")
    assert keeper.foreign(reader, prompt(32), pages(1, 2)) == ()
    keeper.claim(reader, pages(4))
    keeper.wrote(reader, prompt(48), 2, pages(4))
    assert keeper.foreign(reader, prompt(48), pages(1, 2, 4)) == ()


def test_the_prefix_of_another_scope_is_refused_though_its_text_is_the_same() -> None:
    keeper = new_keeper()
    computed(keeper, "b", prompt(32), pages(1, 2))  # vllm PR#12621: a match without the tenant
    found = keeper.foreign(keeper.open("reader", "a"), prompt(32), pages(1, 2))
    assert [(e.kind, e.page) for e in found] == [("prefix", 1), ("prefix", 2)]
    assert "leased of request of b" in found[0].found
    assert keeper.foreign(keeper.open("reader", ""), prompt(32), pages(1, 2)) != ()


def test_a_prefix_of_other_text_or_order_is_refused() -> None:
    keeper = new_keeper()
    computed(keeper, "a", prompt(32), pages(1, 2))
    reader = keeper.open("reader", "a")
    assert [e.page for e in keeper.foreign(reader, prompt(32, 1), pages(1, 2))] == [1, 2]
    reader = keeper.open("reader", "a")
    assert [e.page for e in keeper.foreign(reader, prompt(32), pages(2, 1))] == [2, 1]


def test_the_partly_filled_page_of_another_request_is_refused() -> None:
    keeper = new_keeper()
    computed(keeper, "a", prompt(20), pages(1, 2))
    reader = keeper.open("reader", "a")
    assert [e.page for e in keeper.foreign(reader, prompt(20), pages(1, 2))] == [2]


def test_a_prefix_page_that_was_given_back_is_refused() -> None:
    keeper = new_keeper()
    owner = computed(keeper, "a", prompt(48), pages(1, 2, 3))
    keeper.ledger.pin(pages(3))
    keeper.release(pages(2, 3))  # mini-sglang PR#52: evicted while a row still names them
    reader = keeper.open("reader", "a")
    assert [e.page for e in keeper.foreign(reader, prompt(48), pages(1, 2, 3))] == [2, 3]
    keeper.close(owner)


def test_a_prefix_page_whose_new_owner_has_not_written_yet_is_refused() -> None:
    keeper = new_keeper()
    computed(keeper, "a", prompt(16), pages(1))
    keeper.release(pages(1))
    keeper.claim(keeper.open("next", "b"), pages(1))  # the header in it is still the old one
    reader = keeper.open("reader", "a")
    assert [e.page for e in keeper.foreign(reader, prompt(16), pages(1))] == [1]


@pytest.mark.parametrize("page", [-1, 12, 2**40])
def test_a_prefix_row_outside_the_pool_is_refused(page: int) -> None:
    keeper = new_keeper(12)
    computed(keeper, "a", prompt(16), pages(11))
    (found,) = keeper.foreign(keeper.open("reader", "a"), prompt(16), pages(page))
    assert (found.kind, found.page) == ("prefix", -1)


def test_a_request_is_hashed_as_it_grows_and_may_be_asked_for_less() -> None:
    keeper = new_keeper()
    tokens = prompt(100)
    holding = keeper.open("r", "a")
    root = chain_root("a", "m")
    for count in (0, 15, 16, 40, 100):
        assert keeper.digests(holding, tokens[:count]) == chain(root, tokens, SIZE)[: count // 16]
    for end in (1, 16, 20, 32, 90, 100):  # what it knows beyond the end must not get in
        words = keeper.own_words(holding, tokens, 0, end)
        filled = (words[:, ORDINAL_WORD] >> np.uint64(32)).tolist()
        assert sum(filled) == end
        assert words[:, 4:6].tobytes() == b"".join(chain(root, tokens[:end], SIZE))


def test_chunks_that_end_within_a_page_are_written_again_when_it_grows() -> None:
    keeper = new_keeper()
    tokens = prompt(50)
    holding = keeper.open("r", "a")
    keeper.claim(holding, pages(1, 2))
    keeper.wrote(holding, tokens[:20], 0, pages(1, 2))
    assert keeper.foreign(holding, tokens[:20], pages(1, 2)) == ()
    keeper.claim(holding, pages(3, 4))
    keeper.wrote(holding, tokens, 1, pages(2, 3, 4))
    assert keeper.foreign(holding, tokens, pages(1, 2, 3, 4)) == ()
    assert keeper.foreign(holding, tokens[:20], pages(1, 2)) != (), "it holds more by now"


def test_one_header_never_becomes_that_of_several_pages() -> None:
    keeper = new_keeper()
    holding = keeper.open("r", "a")
    keeper.claim(holding, pages(1, 2))
    with pytest.raises(LocalOwnershipError, match="one page a page of tokens"):
        keeper.wrote(holding, prompt(10), 0, pages(1, 2))
    with pytest.raises(LocalOwnershipError, match="one page a page of tokens"):
        keeper.foreign(holding, prompt(10), pages(1, 2))
