"""What an MLP's activation function gives, computed again in backward instead of kept.

Megatron's MLP keeps two wide tensors for backward: what its first product gives, which is the
activation function's input, and what that function gives, which is the second product's. The second
of them is a fifth of all that a layer of Llama3-8B keeps, and the first one says what it is. Its
storage is emptied after the second product's forward and filled before that product's backward, as
Megatron does it for experts ("moe_act" in `recompute_modules`, CheckpointWithoutOutput in
megatron/core/tensor_parallel/random.py). Hooks of autograd's saved tensors would be simpler, but
transformer-engine then gets its weight as another object, and notes there what it has done.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_prefix.layers.kind import Override, Running

_PRODUCT = "first product"


class ActivatedAgain:
    """Takes the place of both products of one of Megatron's MLPs.

    What lies between them is Megatron's forward itself, run once more with both products left out.

    Args:
        module: the MLP.
        number: of its layer in the model chunk.
        running: says which segment runs.
    """

    def __init__(self, module: Any, number: int, running: Running) -> None:
        self._module, self._running = module, running
        self._key = _PRODUCT, number
        self._first, self._second = module.linear_fc1.forward, module.linear_fc2.forward
        self._product: Any = None  # the first one, while what follows it runs again

    def overrides(self) -> Iterator[Override]:
        """Both products' methods; see Kind."""
        yield self._module.linear_fc1, "forward", self._of_first
        yield self._module.linear_fc2, "forward", self._of_second

    def _of_first(self, *args: Any, **kwargs: Any) -> Any:
        if self._product is not None:
            return self._product
        segment, found = self._running.current, self._first(*args, **kwargs)
        if segment is not None and segment.activates_again and torch.is_grad_enabled():
            segment.between[self._key] = found
        return found

    def _of_second(self, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._product is not None:
            return given, None
        segment, found = self._running.current, self._second(given, *args, **kwargs)
        product = None if segment is None else segment.between.pop(self._key, None)
        if product is not None and _is_apart(given, product[0]):
            self._empty(given, product, found[0])
        return found

    def _empty(self, given: Tensor, product: Any, output: Tensor) -> None:
        """Until `output` gets its gradient."""
        product = tuple(one.detach() if isinstance(one, Tensor) else one for one in product)
        storage = given.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        # A graph outlives its backward where somebody keeps what it ends in, and its hooks with it.
        waiting = [(product, storage)]

        def fill(_: Tensor) -> None:
            product, storage = waiting.pop()
            again = self._activated(product).contiguous().untyped_storage()
            storage.resize_(size)
            storage.copy_(again)  # the tensor's version stays

        output.register_hook(fill)

    @torch.no_grad()
    def _activated(self, product: Any) -> Tensor:
        self._product = product
        try:
            given: Tensor = self._module.forward(product[0])[0]
            return given
        finally:
            self._product = None


def _is_apart(given: Tensor, product: Tensor) -> bool:
    """Whether a tensor has a storage of its own, and all of it."""
    storage = given.untyped_storage()
    return (
        given.requires_grad
        and given.is_contiguous()
        and storage.nbytes() == given.nbytes
        and storage.data_ptr() != product.untyped_storage().data_ptr()
    )
