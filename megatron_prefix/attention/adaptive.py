"""cuDNN where its execution plan pays, FlashAttention-2 elsewhere: the kernel `auto` on a GPU.

cuDNN's attention is faster on large blocks but builds a plan, on the host, for every shape that it
meets, and the lengths of real rollouts are new in every step.  A shape is run by cuDNN once the
time that this would have saved, over the layers of this step and all its calls in earlier ones,
exceeds the time of its plans: who buys skis when the rent has cost as much never pays more than
twice what foresight would.  Shapes are judged between steps, so a forward that activation recompute
runs again meets the same kernel.

The constants are of one H200 (benchmarks/bench_kernels.py; figures in benchmarks/LOG.md); on
another GPU they shift the point of change and nothing else.
"""

from __future__ import annotations

import collections

from torch import Tensor

from megatron_prefix.attention.interface import Aux, Gradients, Kernel, Partial

PLAN_S = 0.058
"""Seconds to build the forward and the backward plan of one shape."""
FLASH_RATE, CUDNN_RATE = 305e12, 539e12
"""Matrix FLOPs a second of both kernels, forward and backward together."""

MAX_SHAPES = 100_000
"""Shapes remembered; a long training meets new ones for ever."""

Shape = tuple[object, ...]


class AdaptiveKernel:
    """Runs every block by the kernel that its shape has earned.

    Args:
        planned: fast, with a plan a shape (cuDNN).
        ready: takes any shape at once (FlashAttention-2).
        num_layers: attention layers that meet each shape in a step.
    """

    def __init__(self, planned: Kernel, ready: Kernel, num_layers: int) -> None:
        self.name = f"{planned.name} or {ready.name} by shape"
        self._planned, self._ready, self._num_layers = planned, ready, num_layers
        self._earlier: collections.Counter[Shape] = collections.Counter()
        self._now: collections.Counter[Shape] = collections.Counter()
        self._planned_now: dict[Shape, bool] = {}

    def begin_step(self) -> None:
        """Counts the calls of the last step; every shape keeps one kernel within a step."""
        if len(self._earlier) > MAX_SHAPES:
            self._earlier.clear()
        self._earlier.update(self._now)
        self._now.clear()
        self._planned_now.clear()

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """See `Kernel.refusal`."""
        return self._planned.refusal(q, k, v) or self._ready.refusal(q, k, v)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
        """See `Kernel.dense`."""
        kernel = self._choice((q.shape, k.shape), q, float(q.shape[0] * k.shape[0]), 1)
        return _tagged(kernel, kernel.dense(q, k, v, scale))

    def causal(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, lengths: tuple[int, ...]
    ) -> Partial:
        """See `Kernel.causal`."""
        pairs = sum(length * length for length in lengths) / 2
        kernel = self._choice((q.shape, k.shape, lengths), q, pairs, len(set(lengths)))
        return _tagged(kernel, kernel.causal(q, k, v, scale, lengths))

    def paired(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        q_lengths: tuple[int, ...],
        k_lengths: tuple[int, ...],
    ) -> Partial:
        """See `Kernel.paired`."""
        each = list(zip(q_lengths, k_lengths, strict=True))
        pairs = sum(float(queries * keys) for queries, keys in each)
        kernel = self._choice((q.shape, q_lengths, k_lengths), q, pairs, len(set(each)))
        return _tagged(kernel, kernel.paired(q, k, v, scale, q_lengths, k_lengths))

    def dense_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, aux: Aux,
        scale: float,
    ) -> Gradients:  # fmt: skip
        """See `Kernel.dense_backward`; by the kernel that ran the forward."""
        kernel, inner = aux
        return kernel.dense_backward(dout, q, k, v, out, lse, inner, scale)

    def causal_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, aux: Aux,
        scale: float, lengths: tuple[int, ...],
    ) -> Gradients:  # fmt: skip
        """See `Kernel.causal_backward`; by the kernel that ran the forward."""
        kernel, inner = aux
        return kernel.causal_backward(dout, q, k, v, out, lse, inner, scale, lengths)

    def paired_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, aux: Aux,
        scale: float, q_lengths: tuple[int, ...], k_lengths: tuple[int, ...],
    ) -> Gradients:  # fmt: skip
        """See `Kernel.paired_backward`; by the kernel that ran the forward."""
        kernel, inner = aux
        lengths = q_lengths, k_lengths
        return kernel.paired_backward(dout, q, k, v, out, lse, inner, scale, *lengths)

    def _choice(self, shape: Shape, q: Tensor, pairs: float, num_plans: int) -> Kernel:
        """The kernel of a shape, the same throughout a step."""
        self._now[shape] += 1
        if shape not in self._planned_now:
            # 4 FLOPs a pair and channel forward, 2.5 times that backward.
            flops = 3.5 * 4 * pairs * q.shape[1] * q.shape[2]
            saved = flops * (1 / FLASH_RATE - 1 / CUDNN_RATE)
            calls = self._earlier[shape] + self._num_layers
            self._planned_now[shape] = saved * calls >= num_plans * PLAN_S
        return self._planned if self._planned_now[shape] else self._ready


def _tagged(kernel: Kernel, part: Partial) -> Partial:
    return Partial(part.out, part.lse, (kernel, part.aux))
