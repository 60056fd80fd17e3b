"""A function with a backward of its own, where autograd's would be another or a slower one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def with_backward(
    make: Callable[..., Any], pull: Callable[..., Any], *tensors: Tensor | None
) -> Any:
    """What `make` returns of some tensors; its gradients go back through `pull`.

    Nothing is saved for the backward but what `pull` refers to: shapes and indices, no tensor that
    `make` is given, nor anything that holds what `make` returns.

    Args:
        make: (tensors) -> a tensor or a tuple of them, not one of those given but perhaps a view.
        pull: (gradients of these) -> gradients of the tensors, a tuple of several; None if there
            is none, and for what is None.
        tensors: that gradients go to.
    """
    return _WithBackward.apply(make, pull, *tensors)


class _WithBackward(Function):
    @staticmethod
    def forward(ctx: Any, make: Any, pull: Any, *tensors: Tensor | None) -> Any:  # type: ignore[override]
        ctx.pull = pull
        return make(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pulled = ctx.pull(*gradients)
        return (None, None, *(pulled if isinstance(pulled, tuple) else (pulled,)))
