"""What a loss reads of a model: only the output of its call, or also what was computed inside.

A hook that keeps a layer's activations for the loss sees whole rollouts with the stock schedule,
and segments with ours.  Autograd's graph tells: nodes are numbered in the order in which a thread
makes them, so those of a model call have numbers between two that are taken around it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

MOST = 10_000
"""Nodes of a loss that are looked at; what it computes itself has some tens."""


class CallGraph(NamedTuple):
    """The nodes of a model call.

    Attributes:
        begin, end: numbers of its nodes, from the first to behind the last.
        outputs: nodes of its output's tensors, which a loss may read.
    """

    begin: int
    end: int
    outputs: tuple[Any, ...]

    @classmethod
    def of(cls, begin: int, output: Any) -> CallGraph:
        """The call that has just returned this, and before which `next_number` was `begin`."""
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        # A write to a view, as trainers divide logits, hangs the graph on to what it is a view of.
        bases = [leaf._base for leaf in leaves if leaf._base is not None]
        nodes = (tensor.grad_fn for tensor in (*leaves, *bases))
        return cls(begin, next_number(), tuple(node for node in nodes if node is not None))

    def is_read_inside(self, loss: Tensor) -> bool:
        """Whether a loss depends on something inside that is not the output."""
        todo, seen = [loss.grad_fn], set(self.outputs)
        while todo and len(seen) < MOST:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if self.begin <= _number(node) < self.end:
                return True
            todo += [following for following, _ in node.next_functions]
        return False


def next_number() -> int:
    """The number of a node that this thread makes now."""
    with torch.inference_mode(False), torch.enable_grad():
        return _number(torch.ones((), requires_grad=True).clone().grad_fn)


def _number(node: Any) -> int:
    # Private: nothing public tells when a node was made.
    return int(node._sequence_nr())
