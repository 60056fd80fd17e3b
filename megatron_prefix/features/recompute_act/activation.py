"""What an MLP's activation function gives, computed again in backward instead of kept.

Megatron's MLP keeps two wide tensors for backward: what its first product gives, which is the
activation function's input, and what that function gives, which is the second product's. The second
of them is a fifth of all that a layer of Llama3-8B keeps, and the first one says what it is. Its
storage is emptied after the MLP's forward and filled before the second product's backward, as
Megatron does it for experts ("moe_act" in `recompute_modules`, CheckpointWithoutOutput in
megatron/core/tensor_parallel/random.py). Hooks of autograd's saved tensors would be simpler, but
transformer-engine then gets its weight as another object, and notes there what it has done.

Only where Megatron's own `MLP.forward` runs is it known what lies between both products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_prefix.layers.kind import Running

_MEGATRONS = "megatron.core.transformer.mlp"
_SCALE = "per_token_scale"


class ActivatedAgain:
    """Runs MLPs of Megatron's of a segment in its forward; see Running.

    Args:
        running: says which segment runs.
    """

    def __init__(self, running: Running) -> None:
        self._running = running

    def __call__(self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an MLP gives."""
        stock = type(module).forward
        if not self._drops(module, stock) or len(args) != 1 or kwargs.get(_SCALE) is not None:
            return stock(module, *args, **kwargs)
        products = _Products(module, stock)
        output = stock(Between(module, products.first, products.second), *args, **kwargs)
        products.drop()
        return output

    def _drops(self, module: Any, stock: Any) -> bool:
        return (
            self._running.current is not None
            and torch.is_grad_enabled()
            and getattr(stock, "__globals__", {}).get("__name__") == _MEGATRONS
            and not _is_watched(module.linear_fc2)
        )


class _Products:
    """Both products of an MLP in one forward.

    Args:
        module: the MLP.
        stock: its forward.
    """

    def __init__(self, module: Any, stock: Callable[..., Any]) -> None:
        self._module, self._stock = module, stock
        self._product: Any = None  # the first one, and what it is added
        self._version = 0
        self._given: Any = None
        self._output: Any = None

    def first(self, x: Tensor) -> Any:
        """The first one."""
        self._product = self._module.linear_fc1(x)
        self._version = self._product[0]._version
        return self._product

    def second(self, activated: Tensor) -> Any:
        """The second one."""
        product = self._module.linear_fc2(activated)
        self._given, self._output = activated, product[0]
        return product

    def drop(self) -> None:
        """Empties the second one's input until its output gets a gradient."""
        activated, product, output = self._given, self._product[0], self._output
        # An activation function that writes its input would write it once more.
        if product._version != self._version or not _is_apart(activated, product):
            return
        kept = tuple(part.detach() if isinstance(part, Tensor) else part for part in self._product)
        module, stock, storage = self._module, self._stock, activated.untyped_storage()
        size, form = storage.nbytes(), (activated.shape, activated.dtype)
        storage.resize_(0)
        # A graph outlives its backward where somebody keeps what it ends in, and its hooks with it.
        waiting = [(kept, storage)]

        def fill(_: Tensor) -> None:
            saved, storage = waiting.pop()
            recomputed = _activated(module, stock, saved)
            if (recomputed.shape, recomputed.dtype) != form:
                raise RuntimeError(
                    f"an MLP gives {recomputed.dtype} {tuple(recomputed.shape)}, not {form}"
                )
            storage.resize_(size)
            storage.copy_(recomputed.contiguous().untyped_storage())  # the tensor's version stays

        output.register_hook(fill)


class Between:
    """One of Megatron's MLPs with other products, for its forward to run on."""

    def __init__(self, module: Any, first: Callable[..., Any], second: Callable[..., Any]) -> None:
        self._module = module
        self.linear_fc1, self.linear_fc2 = _FunctionModule(first), _FunctionModule(second)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _FunctionModule(nn.Module):
    """A function as a module: newer versions of Megatron look (`apply_module`)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Any:
        """What the function gives."""
        return self._function(x)


@torch.no_grad()
def _activated(module: Any, stock: Callable[..., Any], product: Any) -> Tensor:
    """What lies between both products of an MLP: its forward without them, and their hooks."""
    stand_in = Between(module, lambda _: product, lambda activated: (activated, None))
    activated: Tensor = stock(stand_in, product[0])[0]
    return activated


def _is_watched(module: Any) -> bool:
    """Whether hooks see the input of a module that are not Megatron-Core's, and may keep it."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    megatron = "megatron.core."
    return any(not str(getattr(hook, "__module__", "")).startswith(megatron) for hook in hooks)


def _is_apart(activated: Tensor, product: Tensor) -> bool:
    """Whether a tensor has a storage of its own, and all of it."""
    storage = activated.untyped_storage()
    return (
        activated.requires_grad
        and activated.is_contiguous()
        and storage.nbytes() == activated.nbytes
        and storage.data_ptr() != product.untyped_storage().data_ptr()
    )
