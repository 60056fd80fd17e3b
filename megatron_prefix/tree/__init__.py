"""Rollouts become spans, segments and a forest of them. [pure]

Read forest.py (what there is), then build.py (how it is made).
"""

from megatron_prefix.tree.build import (
    Forest,
    Pairs,
    Segment,
    Span,
    TreeOptions,
    Tries,
    build,
    find_shared,
)

__all__ = ["Forest", "Pairs", "Segment", "Span", "TreeOptions", "Tries", "build", "find_shared"]
