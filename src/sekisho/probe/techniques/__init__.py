"""Ways to look for a leak; each a class with its goal, its report and its cost."""

from sekisho.probe.techniques.base import Technique
from sekisho.probe.techniques.boundary import Boundary
from sekisho.probe.techniques.crossed import Crossed
from sekisho.probe.techniques.residue import Residue

__all__ = ["Boundary", "Crossed", "Residue", "Technique"]
