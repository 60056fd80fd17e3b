"""Rollouts become spans, segments and a forest of them. [pure]

Read forest.py (what there is), build.py (how trees are found), packing.py (how they become
segments).
"""

from megatron_prefix.tree.build import Tries, build, find_shared
from megatron_prefix.tree.forest import Forest, Pairs, Place, Segment, Span, TreeOptions

__all__ = [
    "Forest", "Pairs", "Place", "Segment", "Span", "TreeOptions", "Tries", "build", "find_shared",
]  # fmt: skip
