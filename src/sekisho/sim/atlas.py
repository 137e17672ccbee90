"""The fault atlas: every fault that the simulator can inject, named after a public report.

A fault is injected only where the design obliges us to cope, so that every failure is a bug and not
noise (TigerBeetle's rule). What is therefore *not* here: two simultaneous corruptions of a header
and of what its reader expects; a payload torn under an intact header, or read from a page that has
a new owner, where no payload digest is asked for (only under ``strict``); a stray payload that
lands without its header, or between another write's payload and header (payload digests see the
latter); a node that lies about its own state. The threat model names them.
"""

import enum
from dataclasses import dataclass


class Seam(enum.StrEnum):
    """Where a fault comes in."""

    WRITE = "transfer of a batch of pages"
    ANSWER = "prefill's word to decode"
    OFFER = "decode's word to prefill"
    STEP = "block tables of a decode step"
    CHUNK = "source page, before it is sent"
    KEY = "keys of the prefix cache"
    EVENT = "process or clock of a node"
    ASK = "requests of the clients"


@dataclass(frozen=True, slots=True)
class Fault:
    """``reports`` are public; ``sort`` is the class of the catalogue or the number of the list in
    the methods (F1 to F18). ``effect`` is what happens at the seam, with a measure drawn from
    ``amount`` (seconds, pages, tokens or count). ``needs`` shapes the run so that it can matter.
    ``stops`` names the defence that must cope."""

    name: str
    reports: str
    sort: str
    seam: Seam
    effect: str
    stops: str
    needs: tuple[str, ...] = ()
    amount: tuple[float, float] = (0.0, 0.0)


_W, _A, _O, _S, _K, _E, _Q = (
    Seam.WRITE,
    Seam.ANSWER,
    Seam.OFFER,
    Seam.STEP,
    Seam.KEY,
    Seam.EVENT,
    Seam.ASK,
)
_SHORT_S, _LONG_S = (0.1, 0.8), (2.0, 12.0)

# The list of the methods, F1 to F18.
_LIST = [
    Fault("abort-reuse", "sglang#24527", "F1", _W, "stall", "quarantine",
          ("abort", "tight"), _SHORT_S),
    Fault("ack-before-drain", "sglang#31357, sglang PR#38961", "F2", _W, "unknown", "drain",
          ("abort", "tight"), _SHORT_S),
    Fault("timeout-release", "sglang PR#38961", "F3", _W, "stall", "settle-by-proof",
          ("hasty", "tight"), _LONG_S),
    Fault("shared-room", "sglang#26486, CVE-2026-94627", "F4", _O, "repeat", "protocol"),
    Fault("first-token-of-another", "sglang#17259, sglang#22716", "F5", _A, "exchange",
          "commit-check"),
    Fault("late-pull", "dynamo#14018", "F6", _W, "unknown", "source-pin",
          ("tight-prefill",), _SHORT_S),
    Fault("replayed-completion", "sglang PR#24580", "F7", _A, "repeat", "protocol", (), _SHORT_S),
    Fault("torn-page", "sglang PR#8901", "F8", _W, "torn-payload", "payload-digest", ("strict",)),
    Fault("torn-group", "vllm#52234", "F8", _W, "torn-header", "commit-check"),
    Fault("padded-tail", "tt-metal#56324", "F9", _W, "misdirect", "step-check", (), (1, 1)),
    Fault("claimed-unwritten", "CVE-2026-116180, vllm#52617", "F10", _W, "lie", "commit-check"),
    Fault("forged-key", "CVE-2026-105754, CVE-2026-111392, CVE-2026-89032", "F11", _K,
          "forget-tenant", "scope-check", ("same-prompts",)),
    Fault("batch-reorder", "GHSA-fpch-3xrf-7q96, GHSA-v97p-wpxp-px84", "F12", _S, "row-swap",
          "step-check", ("busy",)),
    Fault("index-out-of-range", "CVE-2026-93840, CVE-2026-93989", "F13", _S, "row-alias",
          "step-check", ("busy",)),
    Fault("uninitialised-tail", "CVE-2026-53923", "F14", _W, "unfilled", "commit-check"),
    Fault("exhausted-ids", "sglang#39428, sglang#40125", "F15", _Q, "flood", "queue-limit"),
    Fault("restart-in-place", "vllm#52234, sglang#40730", "F16", _E, "kill-keep", "incarnation",
          ("retry",), (0.0, 0.2)),
    Fault("clock-skew", "vllm PR#47021", "F17", _E, "jump", "settle-by-proof", (), (1.0, 60.0)),
    Fault("preempt-resume", "vllm-ascend#14055, sglang#40730", "F18", _Q, "preempt",
          "step-check", ("preempt",)),
]  # fmt: skip

# One for each distinct class of F1 to F6 in the catalogue.
_PARTIAL = [
    Fault("short-handoff", "sglang#30233, sglang PR#34208", "short handoff accepted", _Q,
          "overlong", "admission"),
    Fault("two-limits", "sglang PR#30325", "two limits, two gates", _Q, "over-prefill",
          "admission"),
    Fault("stale-reference", "vllm#52234", "failed receive = success; stale remote reference",
          _W, "old", "commit-check"),
    Fault("failed-receive", "vllm PR#52232", "failed receive = success", _W, "lie",
          "commit-check"),
    Fault("lost-notice", "vllm PR#50754", "count-based completeness", _W, "short",
          "commit-check"),
    Fault("sick-link", "InferenceX PR#1944, vllm-ascend#5660", "failed transfer = success", _W,
          "fail", "protocol"),
    Fault("success-no-proof", "TRT-LLM PR#19545", "success not proof of write; poisoned publish",
          _W, "gap", "commit-check", ("shared",)),
    Fault("never-filled", "TGI PR#2489", "allocated but never filled", _Q, "abort-early",
          "quarantine", ("shared",)),
    Fault("early-publish", "vllm#41838", "published before filled", _Q, "burst-of-equals",
          "commit-check"),
    Fault("hit-no-proof", "vllm#52617", "hit count not proof of content", _O, "flip",
          "token-digest"),
]  # fmt: skip
_LIFETIME = [
    Fault("slow-link-abort", "sglang PR#32564, sglang PR#35049, vllm PR#32255",
          "free while write in flight", _W, "stall", "quarantine", ("abort", "tight"), _SHORT_S),
    Fault("running-call", "sglang PR#27372", "free while write in flight (remaining window)", _W,
          "stall", "quarantine", ("abort", "tight"), _LONG_S),
    Fault("sibling-writes", "sglang PR#35360", "ack != quiescence", _W, "fail", "drain",
          ("chunked", "stalled-sibling", "tight")),
    Fault("hold-defeated", "sglang PR#38961", "ineffective guard", _W, "unknown",
          "settle-by-proof", ("abort", "tight", "two-decode"), _LONG_S),
    Fault("abort-lost", "sglang PR#35965", "abort dropped by protocol mismatch", _O, "abort-late",
          "quarantine", ("abort", "tight", "chunked"), (0.5, 4.0)),
    Fault("released-twice", "sglang PR#30937, UCM PR#1053", "double free", _A, "repeat",
          "protocol", ("failing",), (0.0, 0.3)),
    Fault("compute-in-flight", "vllm-ascend#14055, sglang PR#36738",
          "free while compute write in flight", _Q, "preempt", "step-check",
          ("preempt", "abort")),
    Fault("wrong-object", "vllm#52360", "source freed before read; wrong object stored", _W,
          "stall", "source-pin", ("tight-prefill", "abort"), _SHORT_S),
    Fault("expired-pull", "vllm#21570, aws-do-eks PR#84, vllm PR#47021", "remote read after free",
          _W, "stall", "source-pin", ("tight-prefill",), (0.5, 3.0)),
    Fault("removed-sequence", "TRT-LLM#12540", "source freed before read", _W, "unknown",
          "source-pin", ("tight-prefill", "abort"), _SHORT_S),
    Fault("swap-in-early", "Z.ai GLM-5 post-mortem, sglang PR#22811",
          "free while write in flight; read before load", _W, "late", "distrust", ("tight",),
          _SHORT_S),
    Fault("freed-in-table", "mini-sglang PR#142", "table points to freed page", _S, "row-stale",
          "step-check", ("busy",)),
    Fault("evicted-in-use", "mini-sglang PR#52", "eviction while referenced", _Q,
          "eviction", "step-check", ("shared", "tight")),
    Fault("owner-overwritten", "vllm PR#49796", "client-chosen id overwrites owner", _O, "repeat",
          "protocol", ("retry",)),
]  # fmt: skip
_IDENTITY = [
    Fault("stale-slot", "sglang PR#17430", "stale metadata slot", _A, "exchange", "commit-check",
          ("busy",)),
    Fault("sentinel", "sglang PR#27374", "sentinel not reset on free", _Q, "churn",
          "commit-check"),
    Fault("several-writers", "sglang#22716", "several writers, one slot", _W, "duplicate",
          "step-check", ("tight",), _SHORT_S),
    Fault("equal-ids", "vllm#10583", "id collision", _Q, "twins", "protocol"),
    Fault("id-reused", "vllm PR#27987", "id used for three purposes", _Q, "ask-again",
          "protocol"),
    Fault("rebound", "sglang#40730", "rebind after retract", _E, "kill", "writer-death",
          ("retry",)),
    Fault("cancel-retry", "sglang#23392", "cancel/retry releases shared state", _Q,
          "cancel-retry", "quarantine"),
    Fault("allocation-order", "vllm#39146", "unknown; allocation-order dependent", _Q, "churn",
          "step-check"),
]  # fmt: skip
_PREFIX = [
    Fault("collision", "Megatron-LM PR#4158, vllm PR#12621, vllm PR#54727", "hash collision", _Q,
          "colliding", "token-digest"),
    Fault("untagged-parts", "vllm#44701", "missing domain separation", _Q, "framing",
          "tenant-key"),
    Fault("image-left-out", "lmcache#690, TRT-LLM PR#14231", "missing multimodal id", _Q,
          "one-token-apart", "token-digest"),
    Fault("truncated-hash", "lmcache#4086", "hash truncation", _Q, "one-token-apart",
          "token-digest"),
    Fault("weak-tier-key", "vllm PR#54342, sglang#37160", "tier key weaker than engine key", _K,
          "forget-tenant", "scope-check", ("same-prompts",)),
    Fault("two-truths", "sglang PR#37058", "fix with two sources of truth", _K, "forget-decode",
          "token-digest", ("same-prompts",)),
    Fault("narrow-key", "lmdeploy#4930", "tier key too narrow", _W, "layout", "commit-check"),
    Fault("wrong-boundary", "MTPLX#247", "wrong state restored", _Q, "a-a-b-a-a", "tenant-key"),
    Fault("two-identities", "Dynamo PR#8197", "two sources of tenant identity", _O, "scope",
          "token-digest"),
]  # fmt: skip
_INDEX = [
    Fault("padding-alias", "TRT-LLM PR#13278", "padding aliases live slot", _S, "row-alias",
          "step-check", ("busy",)),
    Fault("reserved-page", "kvcached PR#398", "reserved page handed out", _S, "row-zero",
          "step-check", ("busy",)),
    Fault("untranslated", "sglang PR#31471", "address translation missing", _W, "misdirect",
          "commit-check", (), (2, 9)),
    Fault("rank-missing", "LMCache PR#4207", "rank disagreement", _W, "gap", "commit-check"),
    Fault("stale-pointer", "sparkinfer PR#150", "stale captured pointer", _S, "row-stale",
          "step-check", ("busy", "tight")),
    Fault("no-sequence-filter", "llama.cpp PR#27752", "missing sequence filter", _S, "row-alias",
          "step-check", ("busy", "shared")),
    Fault("not-erased", "vllm PR#35219", "recycled page not erased", _W, "short", "commit-check",
          ("tight",)),
    Fault("token-for-page", "sglang PR#19353", "unit error token vs page", _W, "unit",
          "commit-check"),
    Fault("draft-state", "sglang#36548", "unknown; speculative state", _S, "row-swap",
          "step-check", ("busy", "shared")),
    Fault("permuted", "sglang PR#31471", "address translation missing", _W, "permute",
          "commit-check"),
]  # fmt: skip
_TIER = [
    Fault("failed-visible", "lmcache#4991", "failed write visible", _W, "lie", "commit-check",
          ("shared",)),
    Fault("old-layout", "dynamo#14416", "layout/version mismatch", _W, "layout", "commit-check",
          ("retry",)),
    Fault("offload-race", "TRT-LLM#8813", "host offload race", _W, "wrong-source",
          "payload-digest", ("strict",)),
    Fault("source-changed", "vllm#52360", "host offload race", Seam.CHUNK, "foreign",
          "source-check"),
    Fault("promised-length", "sglang PR#31881", "stale length promised to peer", _O, "skip",
          "commit-check"),
    Fault("counter-first", "sglang PR#8901", "counter before data", _W, "late", "distrust", (),
          (0.01, 0.1)),
    Fault("read-first", "sglang PR#38217", "read before load", _W, "late", "distrust",
          ("tight",), (0.05, 3.0)),
    Fault("failed-load", "lmcache#3388", "failed load = success", _W, "fail", "protocol",
          ("shared",)),
    Fault("wrong-snapshot", "llama.cpp#27148", "wrong snapshot restored", _W, "old",
          "commit-check", ("shared",)),
    Fault("frozen-node", "sglang#24527", "free while write in flight", _E, "freeze",
          "settle-by-proof", ("hasty",), (1.0, 8.0)),
    Fault("two-identities-asked", "llama.cpp#27422",
          "unknown, slot/prompt cache regression b9747..b10241", _Q, "one-token-apart",
          "tenant-key"),
]  # fmt: skip

ATLAS: dict[str, Fault] = {
    fault.name: fault
    for fault in [*_LIST, *_PARTIAL, *_LIFETIME, *_IDENTITY, *_PREFIX, *_INDEX, *_TIER]
}
