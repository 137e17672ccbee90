"""Evidence as the guards log it: one JSON object a line, ids and numbers, never text."""

import json
from collections.abc import Sequence

from sekisho.core.errors import Evidence

_PAGES_MAX = 16


def evidence_line(name: str, role: str, evidence: Sequence[Evidence], at: str) -> str:
    """Why the request ``name`` failed ``at`` a check; at most 16 pages of it."""
    pages = [
        {"kind": e.kind, "page": e.page, "expected": e.expected, "found": e.found}
        for e in evidence[:_PAGES_MAX]
    ]
    count = len(evidence)
    said = {"request": name, "role": role, "at": at, "count": count, "pages": pages}
    return f"sekisho evidence {json.dumps(said)}"
