"""What a segment's queries see, as a short list of dense blocks.  Pure.

The K/V of inner segments lie in buffers, one a chunk chain, so all chunks of a chain are one dense
block to whatever comes below them.  A segment's own keys are its causal block and need no entry
here.  (The two key regions of a shared-prompt microbatch in "DualKV", section 3, are the case of
one dense block and one causal block.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_prefix.tree import Segment

PIECE_ROWS = 1 << 15
"""Most keys that one call of a kernel sees without a mask, on one rank (cache.py)."""


class Block(NamedTuple):
    """Keys [0, stop) of the buffer whose chain begins at segment `head`, seen without a mask."""

    head: int
    stop: int


@dataclass(frozen=True)
class BufferMap:
    """Where every inner segment's K/V lies.

    Attributes:
        head: per segment the first segment of its chain (itself for a wave).
        offset: per segment its first row in the chain's buffer.
        length: per chain head the rows of its buffer.
        blocks: per segment the dense blocks that its queries see, root first.
    """

    head: tuple[int, ...]
    offset: tuple[int, ...]
    length: dict[int, int]
    blocks: tuple[tuple[Block, ...], ...]


def buffer_map(segments: Sequence[Segment], parts: int = 1) -> BufferMap:
    """Lays the inner segments of a step out in buffers.

    Args:
        segments: the step's, in F-order.
        parts: ranks that share the rows of every segment equally (context parallelism); the map is
            of one rank's rows.
    """
    head: list[int] = []
    offset: list[int] = []
    length: dict[int, int] = {}
    blocks: list[tuple[Block, ...]] = []
    for index, segment in enumerate(segments):
        chained = segment.extends and segment.parent >= 0
        head.append(head[segment.parent] if chained else index)
        offset.append(length[head[index]] if chained else 0)
        if segment.inner:
            length[head[index]] = offset[index] + segment.padded_length // parts
        if segment.parent < 0:
            blocks.append(())
            continue
        above = segment.parent
        seen = Block(head[above], offset[above] + segments[above].padded_length // parts)
        before = tuple(block for block in blocks[above] if block.head != seen.head)
        blocks.append((*before, seen))
    return BufferMap(tuple(head), tuple(offset), length, tuple(blocks))
