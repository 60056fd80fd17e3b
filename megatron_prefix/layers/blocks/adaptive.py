"""Kernels that choose another kernel for every block: by its mask, or by its shape.

By shape is the kernel `auto` on a GPU without FlashAttention-4: cuDNN where its plan pays, else
FA2. cuDNN is faster on large blocks but builds a plan, on the host, for every new shape, and the
lengths of real rollouts are new in every step. A shape changes to cuDNN when the time that cuDNN
would have saved so far, in this step's layers and in all earlier calls, exceeds the time of its
plans. This costs at most twice the best choice in hindsight (the ski-rental problem). The choice
changes only between steps, so recomputation in a backward uses the forward's kernel.

The constants were measured on one H200 (benchmarks/bench_kernels.py; figures in benchmarks/LOG.md).
On another GPU they only change the point of the switch.
"""

from __future__ import annotations

import collections

from torch import Tensor

from megatron_prefix.layers.blocks.batched import batches
from megatron_prefix.layers.blocks.interface import Aux, Gradients, Kernel, Partial, Runs

PLAN_S = 0.058
"""Seconds to build the forward and the backward plan of one shape."""
FLASH_RATE, CUDNN_RATE = 305e12, 539e12
"""FLOPs a second of the kernels, forward and backward together."""
CALL_S = 0.00015
"""Seconds of one more call: cuDNN takes one for each batch of equal runs, FlashAttention-2 one for
all. 0.07 ms forward (15 runs of 548 queries on 101 keys, as one call and as 15), backward alike."""

MAX_SHAPES = 100_000
"""Shapes remembered, as a long training always has new ones."""

Shape = tuple[object, ...]


class Choosing(Kernel):
    """Runs every block with one of several kernels, its backward with the same one.

    Args:
        parts: the kernels; all must take the tensors.
    """

    def __init__(self, name: str, *parts: Kernel) -> None:
        self.name, self._parts = name, parts

    def choice(self, q: Tensor, k: Tensor, runs: Runs) -> Kernel:
        raise NotImplementedError

    def begin_step(self) -> None:
        for part in self._parts:
            part.begin_step()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float) -> Partial:
        kernel = self.choice(q, k, runs)
        part = kernel.forward(q, k, v, runs, scale)
        return Partial(part.out, part.lse, (kernel, part.aux))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, aux: Aux,
        runs: Runs, scale: float,
    ) -> Gradients:  # fmt: skip
        kernel, inner = aux
        gradients: Gradients = kernel.backward(dout, q, k, v, out, lse, inner, runs, scale)
        return gradients


class CompositeKernel(Choosing):
    """Runs without a mask by one kernel, causal runs by another."""

    def __init__(self, dense: Kernel, causal: Kernel) -> None:
        super().__init__(f"{dense.name}+{causal.name}", dense, causal)

    def choice(self, q: Tensor, k: Tensor, runs: Runs) -> Kernel:
        return self._parts[runs.causal]


class AdaptiveKernel(Choosing):
    """Runs every block with the kernel chosen for its shape.

    Args:
        planned: fast, needs a plan for each shape (cuDNN).
        ready: takes any shape at once (FlashAttention-2).
    """

    def __init__(self, planned: Kernel, ready: Kernel, num_layers: int) -> None:
        super().__init__(f"{planned.name} or {ready.name} by shape", planned, ready)
        self._num_layers = num_layers
        self._earlier: collections.Counter[Shape] = collections.Counter()
        self._now: collections.Counter[Shape] = collections.Counter()
        self._planned_now: dict[Shape, bool] = {}

    def begin_step(self) -> None:
        super().begin_step()
        if len(self._earlier) > MAX_SHAPES:
            self._earlier.clear()
        self._earlier.update(self._now)
        self._now.clear()
        self._planned_now.clear()

    def choice(self, q: Tensor, k: Tensor, runs: Runs) -> Kernel:
        shape = (q.shape, k.shape, runs)
        self._now[shape] += 1
        if shape not in self._planned_now:
            calls = self._earlier[shape] + self._num_layers
            calls_of = batches(runs, q.shape[0], k.shape[0])
            shapes = [
                (query_batch.num, query_batch.length, key_batch.length)
                for query_batch, key_batch in calls_of
            ]
            # cuDNN takes a causal run with more keys than queries as two (batched.py).
            parts = [2 if runs.causal and keys > queries else 1 for _, queries, keys in shapes]
            hidden = 0.5 if runs.causal else 0.0  # of a square of queries and keys
            pairs = sum(n * queries * (keys - hidden * queries) for n, queries, keys in shapes)
            # 4 FLOPs a pair and channel forward, 2.5 times that backward.
            flops = 3.5 * 4 * pairs * q.shape[1] * q.shape[2]
            saved = flops * (1 / FLASH_RATE - 1 / CUDNN_RATE) - (sum(parts) - 1) * CALL_S
            self._planned_now[shape] = (
                saved * calls >= sum(dict(zip(shapes, parts, strict=True)).values()) * PLAN_S
            )
        planned, ready = self._parts
        return planned if self._planned_now[shape] else ready
