"""The ledger of a large pool: what one request of a million tokens costs, without any payload.

reserve: a lease, its pages, and the headers that are expected in them. verify: one pass over all
of its pages. release: the pages back to the pool. Digests of the tokens are computed beforehand:
they are a cost of the text (`chain`, in the table for information), not of the ledger. Times are
of the processor: one thread that never waits, so on a quiet machine the clock says the same.
"""

import mmap
import time
from statistics import median

import numpy as np

from bench.demo import load_demo
from bench.report import SEED, BenchError, Row
from sekisho.core.memory import PageMemory
from sekisho.core.page import PageLayout, chain, chain_root
from sekisho.core.pool import Pool
from sekisho.core.table import BlockTable, verify

ROUNDS = 25
POOL_TOKENS = 2_040_000
REQUEST_TOKENS = 1_048_576
TARGET_MS = 5.0
TARGET_BYTES = 64
PAGE_SIZE = 16
_MAP_NORESERVE = 0x4000  # Linux; in Python's mmap from 3.13 on


def run(rounds: int | None) -> list[Row]:
    """Medians in milliseconds: headers as close as they can lie, in a new pool and in one that has
    been used, and as far as real pages put them (of those only the headers are ever touched)."""
    small = PageLayout(PAGE_SIZE, 1, 1, 1, 1, "ledger")
    generator = np.random.default_rng(SEED)
    tokens = generator.integers(0, 2**16, REQUEST_TOKENS).tolist()
    root = chain_root("bench", small.model)
    start = time.thread_time()
    digests = chain(root, tokens, PAGE_SIZE)
    hashing = (time.thread_time() - start) * 1e3
    rows = []
    real = load_demo().layout
    for layout, used, target in (
        (small, False, TARGET_MS),
        (small, True, None),
        (real, True, None),
    ):
        times, page_bytes = _measure(layout, used, root, digests, rounds or ROUNDS)
        order = "pages in no order" if used else "a new pool"
        where = f"{order}, headers {layout.page_bytes} B apart"
        for name, values in times.items():
            samples = {"ours": values}
            rows.append(
                Row(
                    "ledger", name, "ms", median(values), target=target, note=where, samples=samples
                )
            )
    rows.append(Row("ledger", "chain", "ms", hashing, note="digests of 1,048,576 tokens"))
    rows.append(Row("ledger", "bytes a page", "B", page_bytes, target=TARGET_BYTES))
    return rows


def _measure(
    layout: PageLayout, used: bool, root: bytes, digests: list[bytes], rounds: int
) -> tuple[dict[str, list[float]], float]:
    count = layout.pages_for(POOL_TOKENS)
    pool = Pool(count, SEED)
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    buffer = mmap.mmap(-1, count * layout.page_bytes, flags=flags)
    buffer.madvise(mmap.MADV_NOHUGEPAGE)
    memory = PageMemory(np.frombuffer(buffer, np.uint8), layout, count)
    lease = pool.open_lease("bench")
    pages = pool.grant(lease, count)
    if used:  # what went back in no order is given out in no order
        pages = np.random.default_rng(SEED).permutation(pages)
    memory.blank(pages)
    pool.drop(pages, np.full(count, lease.serial, np.uint64))
    times: dict[str, list[float]] = {"reserve": [], "verify": [], "release": []}
    for request in range(rounds + 1):
        begin = time.thread_time()
        lease = pool.open_lease("bench")
        pages = pool.grant(lease, len(digests))
        table = BlockTable(layout, request, lease, root)
        table.expect(pages, REQUEST_TOKENS, [], digests)
        reserved = time.thread_time()
        memory.words[pages] = table.words  # what the writer does
        written = time.thread_time()
        evidence = verify(memory, [table])
        verified = time.thread_time()
        pool.drop(table.pages, table.serials)
        pool.close_lease(lease)
        end = time.thread_time()
        if evidence:
            raise BenchError("the ledger's own headers do not agree")
        times["reserve"].append((reserved - begin) * 1e3)
        times["verify"].append((verified - written) * 1e3)
        times["release"].append((end - verified) * 1e3)
    # the first round touches the memory for the first time
    return {name: values[1:] for name, values in times.items()}, pool.ledger_bytes() / count
