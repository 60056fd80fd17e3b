"""What the layers that have graphs hold: modules, weights, buffers and hooks.

It is looked at before a step's first replay, while the device has nothing to do.  So modules are
listed once, and what they hold is read by loops in C; where a module has taken another's place
since, they are listed again.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from megatron_prefix.features.graphs.cut_layer import CutLayer

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_registries = operator.itemgetter("_modules", "_parameters", "_buffers", *HOOKS)
_values, _is_trained = operator.methodcaller("values"), operator.attrgetter("requires_grad")


class Inside:
    """The modules that graphs of some layers run, as they are now.

    Attributes:
        hooks: in these modules, but for the layers' own, which are called around their forward.
    """

    def __init__(self, layers: Sequence[CutLayer]) -> None:
        self._layers = layers
        self._list()

    def _list(self) -> None:
        layers = [layer.module for layer in self._layers]
        own = {*map(id, layers)}
        inside = (module for layer in self._layers for module in layer.modules())
        self._modules = [*layers, *(module for module in inside if id(module) not in own)]
        self._children = self._read()

    def _read(self) -> list[Any]:
        """Reads what the modules hold now; returns the modules in them."""
        rows = map(_registries, map(vars, self._modules))
        children, weights, buffers, *hooks = [*zip(*rows, strict=True)] or [()] * 7
        self._weights = [weight for weight in _all(weights) if weight is not None]
        self._buffers = [buffer for buffer in _all(buffers) if buffer is not None]
        inside = itertools.chain.from_iterable(of[len(self._layers) :] for of in hooks)
        self.hooks = _all(inside)
        return _all(children)

    def look(self) -> None:
        if self._read() != self._children:
            self._list()

    def addresses(self) -> list[int]:
        """Where weights, gradients and buffers are, and which weights are trained."""
        mains = [getattr(weight, "main_grad", None) for weight in self._weights]
        gradients = [gradient for gradient in mains if gradient is not None]
        places = map(Tensor.data_ptr, [*self._weights, *self._buffers, *gradients])
        return [*places, *map(_is_trained, self._weights)]


def hooks_of(modules: Iterable[Any]) -> list[Any]:
    """Hooks of modules, but of none in them."""
    return _all(vars(module)[name] for module in modules for name in HOOKS)


def _all(registries: Iterable[Any]) -> list[Any]:
    """Values of dicts; the same objects are equal to each other, so lists compare quickly."""
    return [*itertools.chain.from_iterable(map(_values, registries))]
