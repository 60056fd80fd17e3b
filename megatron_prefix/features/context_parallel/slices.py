"""Whether layers are made for the positions of a call that context-parallel ranks hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_prefix.errors import refused
from megatron_prefix.layers.table import payload_parts
from megatron_prefix.megatron.install import installed
from megatron_prefix.refusals.table import CONTIGUOUS
from megatron_prefix.run.calls import CallLayout, slices_of
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.read.read_calls import CallTokens, Numbers
from megatron_prefix.run.read.suspend import Capture
from megatron_prefix.tree.cp_layout import Slices

WORDS = {Slices.ZIGZAG: "chunks of the zig-zag", Slices.CONTIGUOUS: "contiguous parts"}


def check_slices(capture: Capture, rank: Rank, setting: Slices) -> None:
    """Refuses calls that are cut otherwise than a model's attention takes them.

    Args:
        setting: what the trainer says.

    Raises:
        CannotShare: with what ranks hold.
    """
    for chunk, (model, wrapped) in enumerate(zip(rank.language_models, rank.models, strict=True)):
        cut, hooks = slices_of(capture.calls(chunk), setting), installed(wrapped)
        parts = payload_parts(model) if hooks is None else hooks.parts
        if any(part.kind is not None and part.kind.slices is not cut for part in parts):
            raise refused(CONTIGUOUS, WORDS[cut])


def check_positions(tokens: CallTokens, rank: Any) -> None:
    """Refuses position ids of contiguous parts, where the trainer does not say that it cuts so.

    Args:
        rank: of the context-parallel group.

    Raises:
        CannotShare: each rank holds one contiguous part of a sample.
    """
    if tokens.positions is None:
        return
    counts = np.cumsum([sum(layout.lengths) // rank.size() for layout in tokens.layouts])[:-1]
    for layout, positions in zip(tokens.layouts, np.split(tokens.positions, counts), strict=True):
        is_declared = layout.slices is Slices.CONTIGUOUS
        if not is_declared and look_contiguous(layout, positions, rank.rank(), rank.size()):
            raise refused(CONTIGUOUS, WORDS[Slices.CONTIGUOUS])


def look_contiguous(layout: CallLayout, positions: Numbers, rank: int, size: int) -> bool:
    """Whether positions on this rank are those of a contiguous part of any sample, or of a pack."""
    if any(length % size for length in layout.lengths):  # no zig-zag either
        return False
    shares = [length // size for length in layout.lengths]
    parts = zip(shares, np.split(positions, np.cumsum(shares)[:-1]), strict=True)
    if any(n > 1 and np.array_equal(part, np.arange(n) + rank * n) for n, part in parts):
        return True
    if not layout.packed:
        return False
    pack, num = np.concatenate([np.arange(length) for length in layout.lengths]), len(positions)
    return bool(positions.any()) and np.array_equal(positions, pack[rank * num : (rank + 1) * num])
