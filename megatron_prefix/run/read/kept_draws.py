"""What the forward steps of one call draw, so that they can draw it once more.

A suspended forward step cannot go back to its begin. Where the stock schedule has to take a step
whose segments have run, its forward steps begin anew, with the same items of the data iterator and
the same random numbers. What else they have done by then is done twice.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch.utils import (
    _pytree as pytree,  # torch's own; torch.utils.pytree is not public before 2.9
)

from megatron_prefix.errors import refused
from megatron_prefix.megatron.install import intercepted
from megatron_prefix.refusals.table import OTHER_DRAWS


class KeptDraws:
    """The data iterator and the generators of one call.

    Args:
        data_iterator: the trainer's: one, or a list with one per model chunk; it may be anything.
        device: of the model.

    Attributes:
        iterator: what forward steps are to be given.
    """

    def __init__(self, data_iterator: Any, device: torch.device) -> None:
        self._random = random_states(device)
        several = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        self._sources = {id(one): _source_of(one) for one in several}  # chunks may share one
        iterators = [self._sources[id(one)].iterator for one in several]
        self.iterator = iterators if isinstance(data_iterator, list) else iterators[0]

    def rewind(self) -> None:
        """From here on the same is drawn again.

        Raises:
            UserError: a tensor that was drawn has been written to.
        """
        for put_back in self._random:
            put_back()
        for source in self._sources.values():
            source.rewind()


class _KeptIterator:
    """A data iterator that keeps what is drawn; its own source."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._drawn: list[tuple[Any, list[tuple[Tensor, int]]]] = []
        self._again = deque[Any]()
        self.iterator = self

    def __iter__(self) -> _KeptIterator:
        return self

    def __next__(self) -> Any:
        if self._again:
            return self._again.popleft()
        item = next(self._iterator)
        # A forward step may take things out of a dict that it draws.
        kept = copy.copy(item) if isinstance(item, dict | list) else item
        self._drawn.append((kept, _versions(item)))
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def rewind(self) -> None:
        if any(tensor._version != old for _, each in self._drawn for tensor, old in each):
            raise refused(OTHER_DRAWS, "write into tensors that they have drawn")
        self._again.extend(item for item, _ in self._drawn)


class _Attributes:
    """Of an iterator without `__next__`, such as slime's, which counts what was drawn."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self._kept = dict(getattr(iterator, "__dict__", {}))

    def rewind(self) -> None:
        if self._kept:
            vars(self.iterator).update(self._kept)


def _source_of(iterator: Any) -> _KeptIterator | _Attributes:
    return _KeptIterator(iterator) if hasattr(iterator, "__next__") else _Attributes(iterator)


def _versions(item: Any) -> list[tuple[Tensor, int]]:
    """Tensors of an item, and how often each was written to."""
    leaves = (leaf for leaf in pytree.tree_leaves(item) if isinstance(leaf, Tensor))
    return [(leaf, leaf._version) for leaf in leaves if not leaf.is_inference()]


def random_states(device: torch.device) -> list[Callable[[], Any]]:
    """What sets the generators that a step may draw from back to where they are now."""
    states: list[Callable[[], Any]] = [
        functools.partial(torch.set_rng_state, torch.get_rng_state()),
        functools.partial(random.setstate, random.getstate()),
        functools.partial(np.random.set_state, np.random.get_state()),
    ]
    if device.type == "cuda":
        now = torch.cuda.get_rng_state(device)
        states.append(functools.partial(torch.cuda.set_rng_state, now, device))
    tracker = get_cuda_rng_tracker()
    if tracker.is_initialized():
        states.append(functools.partial(_set_tracker, tracker, _copies(tracker.get_states())))
    return states


def _copies(states: dict[str, Any]) -> dict[str, Any]:
    """Of Megatron's random states: tensors, or generators that CUDA graphs can use."""
    return {
        name: state.clone() if isinstance(state, Tensor) else state.clone_state()
        for name, state in states.items()
    }


def _set_tracker(tracker: Any, states: dict[str, Any]) -> None:
    for name, state in states.items():
        held = tracker.states_[name]
        if isinstance(held, Tensor):
            tracker.states_[name] = state.clone()
        else:
            held.set_state(state.get_state())


@contextlib.contextmanager
def same_calls(model: Any, tokens: Sequence[Tensor | None]) -> Iterator[None]:
    """Inside, a model chunk is called with the same tokens again, among other calls perhaps.

    Raises:
        UserError: at the end, if it was not: the forward steps' data come from elsewhere.
    """
    left = deque(one for one in tokens if one is not None and not one.is_nested)

    def intercepting(_: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(stock)

        def forward(*args: Any, **kwargs: Any) -> Any:
            found = signature.bind(*args, **kwargs).arguments.get("input_ids")
            if left and isinstance(found, Tensor) and torch.equal(found, left[0]):
                left.popleft()
            return stock(*args, **kwargs)

        return forward

    with intercepted(model, intercepting):
        yield
    if left:
        raise refused(OTHER_DRAWS, "draw something else then")
