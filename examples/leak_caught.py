"""A leak, and the same leak caught: one minute, the demo model, no server.

Two tenants share a decode node. Tenant A asks about a private note and is answered; A's pages go
back to the pool, as everywhere, without being erased. Then B's hand-off goes wrong the way that
public reports tell (vllm#52234, TensorRT-LLM#19545): the transport says "done" and wrote nothing.

First with the checks off, then with them on. All the rest is the code that ``sekisho serve`` runs:
model, scheduler, both nodes, hand-off, transport.
"""

import secrets
import sys

from sekisho.core.memory import PageMemory
from sekisho.core.pool import Pool
from sekisho.engine.output import Delta
from sekisho.engine.pages import PageManager
from sekisho.engine.params import SamplingParams
from sekisho.engine.policy import POLICIES, Policy
from sekisho.engine.scheduler import Scheduler
from sekisho.lab.machine import LabModel, load_lab_model
from sekisho.lab.pair import NodePair
from sekisho.node.decode import DecodeNode
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

    def __init__(self, model: LabModel, policy: Policy) -> None:
        self._model = model
        layout, tokenizer = model.layout, model.tokenizer
        asked_a = len(tokenizer.encode_chat([{"role": "user", "content": ASK_A}]))
        # So many pages as A needs: B is given the very pages that A has left.
        page_count = layout.pages_for(asked_a + ANSWER_TOKENS)
        target = MemoryTransport(layout.page_bytes, page_count)
        plan = FaultPlan(at={1: Fault.LIE})
        source = FaultyTransport(MemoryTransport(layout.page_bytes, page_count), plan)
        decode_pages, prefill_pages = (
            PageManager(
                PageMemory(transport.region, layout, page_count),
                Pool(page_count, secrets.randbits(63) + 1),
                policy,
            )
            for transport in (target, source)
        )
        scheduler = Scheduler(
            model.runner(target.region, page_count),
            decode_pages,
            tokens_max=decode_pages.tokens_max,
            batch_max=4,
            chunk_tokens=1024,
            queue_max=4,
            local_prefill=False,
        )
        decode = DecodeNode(
            scheduler, decode_pages, tokenizer, vocab_size=model.spec.vocab_size, wait_max=60.0
        )
        prefill = PrefillNode(
            model.runner(source.region, page_count),
            prefill_pages,
            source,
            tokens_max=prefill_pages.tokens_max,
            chunk_tokens=1024,
            queue_max=4,
            wait_max=60.0,
        )
        self._pair = NodePair(decode, prefill, target, layout)
        self._requests = 0

    def ask(self, tenant: str, content: str) -> tuple[str, str]:
        """The answer and the outcome of one chat request."""
        self._requests += 1
        tokens = self._model.tokenizer.encode_chat([{"role": "user", "content": content}])
        params = SamplingParams(
            max_tokens=ANSWER_TOKENS,
            temperature=0.0,
            stop_token_ids=self._model.spec.eos_token_ids,
        )
        self._pair.generate(self._requests, tenant, tokens, params)
        text = outcome = ""
        for event in self._pair.events():
            if isinstance(event, Delta):
                text += event.text
            else:
                outcome = f"{event.code}  {event.message}"
        for evidence in self._pair.evidence:
            print(f"  evidence  {evidence}")
        self._pair.evidence.clear()
        return text, outcome


def main() -> int:
    """0 if the leak shows without the checks and is caught with them."""
    leaked = {}
    # Without prefix reuse A's pages return to the pool at once, in both runs.
    model = load_lab_model()
    for name in ("off", "standard"):
        print(f"\nisolation = {name}")
        machine = Machine(model, POLICIES[name]._replace(reuse=False))
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
