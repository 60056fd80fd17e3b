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
    """The modules that graphs of some layers run, as they are now."""

    def __init__(self, layers: Sequence[CutLayer]) -> None:
        self._layers = layers
        self._list()

    def _list(self) -> None:
        layers = [layer.module for layer in self._layers]
        # Of a router graphs run one method, and its forward is called as without.
        unrouted = itertools.chain.from_iterable(layer.unrouted for layer in self._layers)
        called = [part.inside for part in unrouted if part.holder is part.inside]
        own = {*map(id, layers), *map(id, called)}
        inside = (module for layer in self._layers for module in layer.modules())
        self._modules = [*layers, *called, *(m for m in inside if id(m) not in own)]
        self._num_called = len(layers) + len(called)
        self._children = _all(self._held()[0])

    def _held(self) -> list[Sequence[Any]]:
        """What the modules hold now, by kind: dicts of each. Weights and hooks are the trainer's to
        drop, so nothing here keeps them."""
        rows = map(_registries, map(vars, self._modules))
        return [*zip(*rows, strict=True)] or [()] * (3 + len(HOOKS))

    def look(self) -> list[Any]:
        """Hooks in the modules, but for those of modules whose forward is called: the layers'."""
        if _all(self._held()[0]) != self._children:
            self._list()
        inside = (of_kind[self._num_called :] for of_kind in self._held()[3:])
        return _all(itertools.chain.from_iterable(inside))

    def addresses(self) -> list[int]:
        """Where weights, gradients and buffers are, and which weights are trained."""
        _, weights, buffers, *_ = self._held()
        parameters = [weight for weight in _all(weights) if weight is not None]
        mains = [getattr(parameter, "main_grad", None) for parameter in parameters]
        others = [tensor for tensor in (*_all(buffers), *mains) if tensor is not None]
        places = map(Tensor.data_ptr, [*parameters, *others])
        return [*places, *map(_is_trained, parameters)]


def hooks_of(modules: Iterable[Any]) -> list[Any]:
    """Hooks of modules, but of none in them."""
    return _all(vars(module)[name] for module in modules for name in HOOKS)


def _all(registries: Iterable[Any]) -> list[Any]:
    """Values of dicts; the same objects are equal to each other, so lists compare quickly."""
    return [*itertools.chain.from_iterable(map(_values, registries))]
