"""Where the K/V of inner segments lie, and which of them a segment's queries see.  Pure.

Every chain of chunks has one buffer, so all its chunks are one dense block to the segments below. A
segment's own keys are its causal block and have no entry here. ("DualKV", section 3, is the case of
one dense and one causal block.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_prefix.tree import Segment

PIECE_KEYS = 1 << 15
"""Most keys of a dense block in one call of a kernel (sidecar/cache.py)."""


class Block(NamedTuple):
    """Keys [0, stop) of the buffer of the chain that begins at segment `head`; no mask."""

    head: int
    stop: int


@dataclass(frozen=True)
class BufferMap:
    """Where every inner segment's K/V lies.

    Attributes:
        head: per segment the first segment of its chain (itself for a wave).
        offset: per segment its first position in the chain's buffer.
        length: per chain head the positions of its buffer.
        blocks: per segment the dense blocks that its queries see, root first.
    """

    head: tuple[int, ...]
    offset: tuple[int, ...]
    length: dict[int, int]
    blocks: tuple[tuple[Block, ...], ...]


def buffer_map(segments: Sequence[Segment], parts: int = 1) -> BufferMap:
    """Lays out the inner segments of a step in buffers.

    Args:
        segments: the step's, in F-order.
        parts: context-parallel ranks, which hold equal parts of every segment; the map is of one
            rank's part.
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
