"""Ways to look for a leak; each a class with its goal, its report and its cost."""

from collections.abc import Mapping

from sekisho.probe.techniques.abort import Abort
from sekisho.probe.techniques.base import Technique
from sekisho.probe.techniques.boundary import Boundary
from sekisho.probe.techniques.crossed import Crossed
from sekisho.probe.techniques.ids import Ids
from sekisho.probe.techniques.interference import Interference
from sekisho.probe.techniques.prefix import Prefix
from sekisho.probe.techniques.residue import Residue
from sekisho.probe.techniques.response_cache import ResponseCache
from sekisho.probe.techniques.timing import Timing

TECHNIQUES: Mapping[str, type[Technique]] = {
    one.name: one
    for one in (Boundary, Residue, Abort, Crossed, Prefix, Ids, ResponseCache, Timing, Interference)
}
"""All of them by name, in the order in which they run: those whose finding is proof come first."""

__all__ = [
    "TECHNIQUES",
    "Abort",
    "Boundary",
    "Crossed",
    "Ids",
    "Interference",
    "Prefix",
    "Residue",
    "ResponseCache",
    "Technique",
    "Timing",
]
