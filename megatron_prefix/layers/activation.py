"""What an MLP's activation function gives, computed again in backward instead of kept.

Megatron's MLP keeps two wide tensors for backward: what its first product gives, which is the
activation function's input, and what that function gives, which is the second product's. The second
of them is a fifth of all that a layer of Llama3-8B keeps, and the first one says what it is. (With
experts Megatron has the same for itself: "moe_act" in its `recompute_modules`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        segment = self._running.current
        product = None if segment is None else segment.between.pop(self._key, None)
        if product is None:
            return self._second(given, *args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(*self._without(given, product)):
            return self._second(given, *args, **kwargs)

    def _without(self, given: Tensor, product: Any) -> tuple[Callable, Callable]:
        """Hooks that keep the shape of what is `given` only, since it follows from `product`."""
        where, size = given.data_ptr(), given.numel()  # no reference to it
        product = tuple(one.detach() if isinstance(one, Tensor) else one for one in product)

        def pack(saved: Tensor) -> Any:
            is_given = saved.data_ptr() == where and saved.numel() == size
            return saved.shape if is_given else saved

        def unpack(kept: Any) -> Tensor:
            return kept if isinstance(kept, Tensor) else self._activated(product).view(kept)

        return pack, unpack

    @torch.no_grad()
    def _activated(self, product: Any) -> Tensor:
        self._product = product
        try:
            given: Tensor = self._module.forward(product[0])[0]
            return given
        finally:
            self._product = None
