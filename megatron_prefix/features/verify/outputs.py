"""What the model calls of a step return, as the trainer sees it on the last stage.

Kept are numbers per position; of logits, a random projection per position.  Positions that no loss
reads are zero in the prefix schedule, so those are compared that it has or that a loss reads.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

from megatron_prefix.features.verify.logs import Distance
from megatron_prefix.run.rank import Rank
from megatron_prefix.run.read.suspend import running

ROWS = 1024
"""Rows of logits that are projected together."""


class Output(NamedTuple):
    """One tensor that a model call returned.

    Attributes:
        values: float [positions in some layout], detached.
        is_read: whether a loss has sent it a gradient; None where there is none yet.
    """

    values: Tensor
    is_read: list[Tensor]


class Outputs:
    """Outputs of the model calls of one schedule, by microbatch.

    Args:
        rank: with the model chunks; only those of the last stage have outputs.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._by_call: dict[int, list[Output]] = {}

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Around a schedule."""
        model = self._rank.models[-1]
        if not self._rank.is_last:
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.callback(model.register_forward_hook(self._take).remove)
            yield

    def _take(self, _: Any, __: Any, output: Any) -> None:
        if not (self._rank.forward_only or torch.is_grad_enabled()):
            return  # of a reference, say: a call beside the step's own
        step = running()
        number = len(self._by_call) if step is None else step.number
        leaves = [
            leaf
            for leaf in pytree.tree_leaves(output)
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim()
        ]
        self._by_call[number] = [_output(leaf) for leaf in leaves]

    def distance(self, stock: Outputs) -> Distance | None:
        """The largest difference from the stock schedule's and the largest of these values, at
        least 1; None if there are none."""
        error, size, num = 0.0, 1.0, 0
        for number, expected in stock._by_call.items():
            actual = self._by_call.get(number, [])
            if len(actual) != len(expected):
                return math.inf, size, f"microbatch {number}"
            for ours, theirs in zip(actual, expected, strict=True):
                if ours.values.shape != theirs.values.shape:
                    return math.inf, size, f"microbatch {number}"
                compared = ours.values != 0  # NaN, too
                for read in theirs.is_read:
                    compared |= read
                if compared.any():
                    a, b = (output.values[compared].double() for output in (ours, theirs))
                    error, size = _worse(error, (a - b).abs().max()), _worse(size, b.abs().max())
                    num += 1
        return (error, size, "") if num else None


def _worse(so_far: float, value: Tensor) -> float:
    """The larger; NaN stays."""
    number = float(value)
    return number if math.isnan(number) else max(so_far, number)


def _output(leaf: Tensor) -> Output:
    is_read: list[Tensor] = []
    if leaf.requires_grad:
        leaf.register_hook(functools.partial(_note_read, is_read, leaf.dim() > 2))
    values = _projection(leaf.detach()) if leaf.dim() > 2 else leaf.detach().clone()
    return Output(values, is_read)


def _note_read(is_read: list[Tensor], is_wide: bool, gradient: Tensor) -> None:
    read = gradient != 0
    is_read.append(read.any(-1) if is_wide else read)


def _projection(logits: Tensor) -> Tensor:
    """[..., width] -> [...]: sums over the last dimension with fixed random weights."""
    width = logits.shape[-1]
    draw = torch.Generator().manual_seed(width)
    weights = torch.randn(width, generator=draw, dtype=torch.float64) / math.sqrt(width)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    weights = weights.to(logits.device, dtype)
    rows = logits.reshape(-1, width).split(ROWS)
    return torch.cat([part.to(dtype) @ weights for part in rows]).view(logits.shape[:-1])
