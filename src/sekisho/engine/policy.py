"""The one dial, ``isolation``, and what derives from it."""

from typing import NamedTuple


class Policy(NamedTuple):
    """What a node does about ownership.

    Attributes:
        checks: verify at commit and before every release.
        payload_digests: hand-offs carry and check a digest of the payload.
        reuse: pages of ended requests serve later requests of the same scope.
        scrub: payloads are erased when a page becomes free.
        tenants: whether the node may serve tenants at all.
    """

    checks: bool
    payload_digests: bool
    reuse: bool
    scrub: bool
    tenants: bool


POLICIES = {
    "strict": Policy(checks=True, payload_digests=True, reuse=False, scrub=True, tenants=True),
    "standard": Policy(checks=True, payload_digests=False, reuse=True, scrub=False, tenants=True),
    "off": Policy(checks=False, payload_digests=False, reuse=True, scrub=False, tenants=False),
}
