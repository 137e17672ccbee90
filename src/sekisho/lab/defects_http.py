"""One defect for each technique of the probe, so that each has something that it must find.

Like the five of the incident (`switches`), each stands in a public report, and is built from
production code with as little replaced as it needs.
"""

from sekisho.lab.switches import Defect

HTTP_DEFECTS: dict[str, Defect] = {
    "boundary": Defect(
        "incident",
        "sglang#30233, sglang#30325, sglang#38704",
        "all five defects of the incident: a prompt above the prefill pool and within the window "
        "is answered from pages of somebody else",
    ),
    "residue": Defect(
        "wrong-snapshot",
        "llama.cpp#27148",
        "a new conversation is put behind a finished one that is still kept, because only their "
        "lengths are compared",
    ),
    "abort": Defect(
        "dirty-channel",
        "OpenAI 2023-03-20",
        "the channel of a request whose client left is used again while its answer still comes",
    ),
    "crossed": Defect(
        "shared-collector",
        "cloudflare/ai#620",
        "of two calls that wait for their first event together, each is given the other's answer",
    ),
    "prefix": Defect(
        "whole-entry",
        "vllm PR#12621, sglang#37160",
        "the key of a cached prefix names no tenant, and an entry of which only the beginning "
        "matches is attached as a whole",
    ),
    "ids": Defect(
        "client-id",
        "vllm#10583, vllm PR#27987",
        "a request id that the client chose is a key of the whole server: the second request "
        "with it gets the answer of the first",
    ),
    "response-cache": Defect(
        "similar-question",
        "semantic-router#2134, litellm#19575, OmniRoute#3740",
        "answers are kept by the last message alone and given to anybody who asks nearly the same",
    ),
    "timing": Defect(
        "shared-prefixes",
        "CVE-2025-46570",
        "prefixes of all tenants are in one cache: no content shows, but a hit is sooner",
    ),
    "interference": Defect(
        "stale-rows",
        "mlx-lm#965",
        "when the number of running requests changes, the rows of a batch are read one off, so "
        "that a token is sampled from another request's distribution",
    ),
}
"""By the name of the technique."""
