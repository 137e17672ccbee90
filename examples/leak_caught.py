"""A leak, and the same leak caught: one minute, the demo model, no server.

Two tenants share a decode node. Tenant A asks about a private note and is answered; A's pages go
back to the pool, as everywhere, without being erased. Then B's hand-off goes wrong the way that
public reports tell (vllm#52234, TensorRT-LLM#19545): the transport says "done" and wrote nothing.

First with the checks off, then with them on. All the rest is the code that ``sekisho serve`` runs:
model, scheduler, both nodes, hand-off, transport.
"""

import secrets
import sys

import numpy as np
import torch
from numpy.typing import NDArray

from sekisho.core.memory import PageMemory
from sekisho.core.page import PageLayout
from sekisho.core.pool import Pool
from sekisho.engine.batch import Runner
from sekisho.engine.demo import ensure_demo_model
from sekisho.engine.kernels.build import KernelUnavailable
from sekisho.engine.native import NativeRunner
from sekisho.engine.output import Delta, Ended
from sekisho.engine.pages import PageManager
from sekisho.engine.params import SamplingParams
from sekisho.engine.policy import POLICIES, Policy
from sekisho.engine.reference import ReferenceRunner
from sekisho.engine.scheduler import Scheduler
from sekisho.engine.spec import load_spec
from sekisho.engine.tokenizer import load_tokenizer
from sekisho.engine.weights import load_weights
from sekisho.node.decode import DecodeNode
from sekisho.node.messages import Condemned, Distrust, Generate, Join
from sekisho.node.prefill import PrefillNode
from sekisho.transport import MemoryTransport
from sekisho.transport.faulty import Fault, FaultPlan, FaultyTransport

CODE = str(secrets.randbelow(900_000) + 100_000)
ASK_A = (
    "Private note of tenant A. The quarterly meeting was moved to Thursday. Ines brings the "
    f"figures. The door code of the archive is {CODE}. Nobody else may know it.\n\n"
    "What is the door code of the archive?"
)
ASK_B = "What can I cook tonight with rice, two eggs and a few spring onions? " * 3
ANSWER_TOKENS = 40


class Machine:
    """A prefill and a decode node in one process; the second hand-off is the faulty one."""

    def __init__(self, policy: Policy) -> None:
        folder = ensure_demo_model()
        self._spec = load_spec(folder)
        self._weights = load_weights(folder, self._spec, torch.bfloat16)
        self._tokenizer = load_tokenizer(folder)
        spec = self._spec
        self._layout = PageLayout(
            16, spec.layer_count, spec.kv_head_count, spec.head_size, 2, "demo"
        )
        asked_a = len(self._tokenizer.encode_chat([{"role": "user", "content": ASK_A}]))
        # So many pages as A needs: B is given the very pages that A has left.
        page_count = self._layout.pages_for(asked_a + ANSWER_TOKENS)
        target = MemoryTransport(self._layout.page_bytes, page_count)
        plan = FaultPlan(at={1: Fault.LIE})
        source = FaultyTransport(MemoryTransport(self._layout.page_bytes, page_count), plan)
        decode_pages, decode_runner = self._parts(target.region, page_count, policy)
        prefill_pages, prefill_runner = self._parts(source.region, page_count, policy)
        scheduler = Scheduler(
            decode_runner,
            decode_pages,
            tokens_max=decode_pages.tokens_max,
            batch_max=4,
            chunk_tokens=1024,
            queue_max=4,
            local_prefill=False,
        )
        self._decode = DecodeNode(
            scheduler,
            decode_pages,
            self._tokenizer,
            vocab_size=spec.vocab_size,
            wait_max=60.0,
        )
        self._prefill = PrefillNode(
            prefill_runner,
            prefill_pages,
            source,
            tokens_max=prefill_pages.tokens_max,
            chunk_tokens=1024,
            queue_max=4,
            wait_max=60.0,
        )
        self._decode.prefill_up("prefill")
        self._prefill.receive("decode", Join(target.endpoint(), self._layout.fingerprint), 0.0)
        self._requests = 0

    def ask(self, tenant: str, content: str) -> tuple[str, str]:
        """The answer and the outcome of one chat request."""
        self._requests += 1
        tokens = self._tokenizer.encode_chat([{"role": "user", "content": content}])
        params = SamplingParams(
            max_tokens=ANSWER_TOKENS, temperature=0.0, stop_token_ids=self._spec.eos_token_ids
        )
        request = Generate(self._requests, tenant, tokens, params, "prefill")
        self._decode.generate(request, 0.0)
        text = ""
        while True:
            for event in self._step():
                if isinstance(event, Delta):
                    text += event.text
                elif isinstance(event, Ended):
                    return text, f"{event.code}  {event.message}"

    def _step(self) -> list[Delta | Ended | Distrust | Condemned]:
        self._decode.step(0.0)
        for _, offer in self._decode.to_prefill:
            self._prefill.receive("decode", offer, 0.0)
        self._decode.to_prefill.clear()
        self._prefill.step(0.0)
        for _, answer in self._prefill.outbox:
            self._decode.answer("prefill", answer)
        self._prefill.outbox.clear()
        for evidence in self._decode.violations:
            print(f"  evidence  {evidence}")
        self._decode.violations.clear()
        return self._decode.to_gateway()

    def _parts(
        self, region: NDArray[np.uint8], page_count: int, policy: Policy
    ) -> tuple[PageManager, Runner]:
        memory = PageMemory(region, self._layout, page_count)
        pages = PageManager(memory, Pool(page_count, secrets.randbits(63) + 1), policy)
        model = (self._spec, self._weights, region, self._layout, page_count)
        try:
            return pages, NativeRunner(*model, threads=2)
        except KernelUnavailable:
            return pages, ReferenceRunner(*model)


def main() -> int:
    """0 if the leak shows without the checks and is caught with them."""
    leaked = {}
    # Without prefix reuse A's pages return to the pool at once, in both runs.
    for name in ("off", "standard"):
        print(f"\nisolation = {name}")
        machine = Machine(POLICIES[name]._replace(reuse=False))
        for tenant, content in (("tenant-a", ASK_A), ("tenant-b", ASK_B)):
            text, outcome = machine.ask(tenant, content)
            marked = text.replace(CODE, f">>>{CODE}<<<") if tenant == "tenant-b" else text
            print(f"  {tenant}  {marked!r}\n  outcome   {outcome}")
            leaked[name] = CODE in text
    print(f"\nB was shown A's door code: without the checks {leaked['off']}, ", end="")
    print(f"with them {leaked['standard']}.")
    return 0 if leaked["off"] and not leaked["standard"] else 1


if __name__ == "__main__":
    sys.exit(main())
