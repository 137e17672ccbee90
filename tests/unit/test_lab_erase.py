"""The five ways of ``sekisho lab erase``, over the stand-in model."""

import numpy as np

from lab_kit import stand_in_model
from sekisho.core.memory import PageMemory
from sekisho.core.pool import Pool
from sekisho.engine.policy import POLICIES
from sekisho.lab.erase import WAYS, run_erase
from sekisho.lab.erasing import ErasingPages
from sekisho.lab.show import erase_lines
from stand_in import LAYOUT


def test_every_way_is_measured_against_nothing() -> None:
    said: list[str] = []
    prices = run_erase(stand_in_model(), 2, 1, said.append)
    assert [price.name for price in prices] == list(WAYS)
    assert prices[0].ratio == 1.0
    assert all(price.tokens_per_second > 0 < price.bytes_per_second for price in prices)
    assert len(said) == 3 * len(WAYS)
    assert {line.rpartition(" ")[2] for line in said[5:10]} == set(WAYS)
    assert said[5].endswith("headers"), "each round starts with another way"
    assert [line.split()[0] for line in erase_lines(prices)[1:]] == list(WAYS)


def test_the_ways_are_what_they_say() -> None:
    policies = {name: way.policy for name, way in WAYS.items()}
    assert not any(policy.tenants or policy.reuse for policy in policies.values())
    assert [name for name, policy in policies.items() if policy.checks] == ["headers", "checksum"]
    assert [name for name, policy in policies.items() if policy.payload_digests] == ["checksum"]
    assert [name for name, policy in policies.items() if policy.scrub] == ["scrub-on-free"]
    assert [name for name, way in WAYS.items() if way.erases] == ["erase-on-reuse"]


def test_an_erasing_pool_zeroes_what_it_grants() -> None:
    region = np.full(2 * LAYOUT.page_bytes, 7, np.uint8)
    memory = PageMemory(region, LAYOUT, 2)
    pages = ErasingPages(memory, Pool(2, 1), POLICIES["off"])
    table = pages.reserve(1, "t", pages.text("t", list(range(16))), remote=True)
    assert table is not None
    assert not memory.payload(0).any() and memory.payload(1).all()
    assert pages.grow(table)
    assert not memory.payload(1).any()
