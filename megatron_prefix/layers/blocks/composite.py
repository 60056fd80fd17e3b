"""Kernels that run every block with one of several others."""

from __future__ import annotations

from torch import Tensor

from megatron_prefix.layers.blocks.interface import Aux, Gradients, Kernel, Partial, Runs


class Choosing(Kernel):
    """Runs every block with one of several kernels, its backward with the same one.

    Args:
        name: the name that is shown.
        parts: the kernels; all must take the tensors.
    """

    def __init__(self, name: str, *parts: Kernel) -> None:
        self.name, self._parts = name, parts

    def choice(self, q: Tensor, k: Tensor, runs: Runs) -> Kernel:
        """The kernel of a block."""
        raise NotImplementedError

    def begin_step(self) -> None:
        """See `Kernel.begin_step`."""
        for part in self._parts:
            part.begin_step()

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """See `Kernel.refusal`."""
        return next((why for part in self._parts if (why := part.refusal(q, k, v))), None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float) -> Partial:
        """See `Kernel.forward`."""
        kernel = self.choice(q, k, runs)
        part = kernel.forward(q, k, v, runs, scale)
        return Partial(part.out, part.lse, (kernel, part.aux))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, aux: Aux,
        runs: Runs, scale: float,
    ) -> Gradients:  # fmt: skip
        """See `Kernel.backward`."""
        kernel, inner = aux
        gradients: Gradients = kernel.backward(dout, q, k, v, out, lse, inner, runs, scale)
        return gradients


class CompositeKernel(Choosing):
    """Runs without a mask by one kernel, causal runs by another."""

    def __init__(self, dense: Kernel, causal: Kernel) -> None:
        super().__init__(f"{dense.name}+{causal.name}", dense, causal)

    def choice(self, q: Tensor, k: Tensor, runs: Runs) -> Kernel:
        """See `Choosing.choice`."""
        return self._parts[runs.causal]
