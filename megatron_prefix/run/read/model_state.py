"""What a model holds beside its computation, and what a forward step has changed of it.

An adapter picks its weights by `module.slot`, a router its loss by `config.moe_z_loss_coeff`.  A
segment serves several microbatches, so that what a model holds (model_walk.py) has to be the same
at all of their model calls: attributes and items by their values, tensors by their place in memory
and their version.

What a call of the model changes inside is its own business.  So the state is read when a forward
step begins and when it calls the model: between the two only the trainer's code runs.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron_prefix.errors import refused
from megatron_prefix.refusals.table import STATE_LOST, SWITCHED
from megatron_prefix.run.read.loss_variables import Place, closure
from megatron_prefix.run.read.model_walk import (
    NOT_OWN,
    OF_MODULE,
    SMALL,
    Holder,
    copied,
    holds_state,
    members_of,
    walk_of,
)

logger = logging.getLogger(__name__)

MOST_COPIED = 256
"""Small tensors, other than parameters, that are copied, so that they can be put back."""
MOST_WRAPPERS = 4
"""Modules in one another, a trainer's around a model."""
SAMPLED = 64
"""Elements of a tensor that are compared where values are, evenly spread."""
MOST_DEPTH = 6
"""Of values in one another that are compared, where an object was replaced."""
_MISSING = object()
_version = operator.attrgetter("_version")


class Change(NamedTuple):
    """Something that has another value than before.

    Attributes:
        holder: its number; of a tensor the tensor's.
        name: of an attribute or key; None: a whole list, set or tensor.
        before, after: values; of a tensor copies, None of one that is not copied.
        is_tensor: whether it is a tensor that was written in place.
    """

    holder: int
    name: Any
    before: Any
    after: Any
    is_tensor: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether nothing has kept what was there before."""
        return self.is_tensor and self.before is None


class ModelState:
    """What some models hold now.

    Args:
        models: language models, then what is around them.
        num_inner: how many of `models` are language models.
        outer: modules around them of which others' parts are not looked at.
        samples: compares elements of tensors, too, as a write through `.data` leaves no other
            trace; the host waits for the device.
    """

    def __init__(
        self,
        models: Sequence[Any],
        num_inner: int,
        outer: Sequence[Any] = (),
        *,
        samples: bool = False,
    ) -> None:
        walk, self._read = walk_of(models, num_inner, outer)
        self._walk, self._samples = walk, samples
        self._sizes = walk.sizes()
        self._weights = [*self._weights_now()]
        self._tensors = [tensor for tensor, _, _ in walk.tensors]
        others = (n for n, t in enumerate(self._tensors) if not isinstance(t, nn.Parameter))
        small = (n for n in others if self._tensors[n].numel() <= SMALL)
        few = itertools.islice(small, MOST_COPIED)
        self._kept = {n: self._tensors[n].detach().clone() for n in few}
        self._marks = self._marks_now()

    def changes(self, *, inner: bool = False) -> list[Change]:
        """What has another value by now.

        Args:
            inner: only in the language models, and what they have in common with others.
        """
        with contextlib.suppress(Exception):  # odd values cannot be compared so
            if self._is_same():
                return []
        most = self._walk.num_inner if inner else len(self._walk.holders)
        return [
            *itertools.chain.from_iterable(map(self._changes_of, range(most))),
            *(self._filled(most)),
            *(write for write in self._written() if self._walk.tensors[write.holder][1] < most),
        ]

    def put_back(self, changes: Iterable[Change]) -> None:
        self._write((change, change.before) for change in changes)

    def repeat(self, changes: Iterable[Change]) -> None:
        self._write((change, change.after) for change in changes)

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        before = self.changes()
        try:
            yield
        finally:
            self.accept_others(before)

    def accept_others(self, changes: Iterable[Change]) -> None:
        known = {(change.holder, change.name, change.is_tensor) for change in changes}
        for change in self.changes():
            if (change.holder, change.name, change.is_tensor) not in known:
                self._accept(change)
        self._weights = [*self._weights_now()]
        self._sizes = self._walk.sizes()
        self._marks = self._marks_now()

    def path(self, change: Change) -> str:
        if change.is_tensor:
            return self._walk.path(*self._walk.tensors[change.holder][1:])
        return self._walk.path(change.holder, change.name)

    def _is_same(self) -> bool:
        """Whether nothing has changed: comparisons in C, half a millisecond for 1,000 modules."""
        return (
            self._walk.sizes() == self._sizes
            and self._walk.now() == self._read
            and all(map(operator.is_, self._weights_now(), self._weights))
            and not any(self._walk.registries)
            and self._marks_now() == self._marks
        )

    def _weights_now(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(dict.values, self._walk.weights))

    def _marks_now(self) -> list[list[Any]]:
        """Of every tensor what tells that it was written, or moved."""
        marks: list[list[Any]] = [[*map(_version, self._tensors)], _data_pointers(self._tensors)]
        return [*marks, [*map(_sample, self._tensors)]] if self._samples else marks

    def _changes_of(self, number: int) -> Iterator[Change]:
        value, before = self._walk.holders[number].value, self._read[number]
        if row := self._walk.rows.get(number):
            before = dict(zip(row.names, before, strict=False))
            value = {name: member for name, member in value.items() if name not in NOT_OWN}
        else:
            value = value.read() if isinstance(value, Place) else copied(value)
        if not isinstance(value, Mapping):
            if not _is_same_value(before, value):
                yield Change(number, None, before, value)
            return
        kind = self._walk.holders[number].kind
        for name in [*before, *(name for name in [*value] if name not in before)]:
            was, by_now = before.get(name, _MISSING), value.get(name, _MISSING)
            if was is _MISSING and kind is not None:  # it was the class's (peft)
                was = getattr(kind, name, _MISSING)
            if was is not by_now and not _is_same_value(was, by_now):
                yield Change(number, name, before.get(name, _MISSING), by_now)

    def _filled(self, most: int) -> Iterator[Change]:
        for registry, owner, name in self._walk.empty:
            if registry and owner < most:
                yield Change(owner, name, {}, dict(registry))

    def _written(self) -> Iterator[Change]:
        before, now = zip(*self._marks, strict=True), zip(*self._marks_now(), strict=True)
        for number, (was, by_now) in enumerate(zip(before, now, strict=True)):
            if was != by_now:
                kept = self._kept.get(number)
                value = None if kept is None else self._tensors[number].detach().clone()
                yield Change(number, None, kept, value, is_tensor=True)

    def _write(self, values: Iterable[tuple[Change, Any]]) -> None:
        for change, value in values:
            if change.is_tensor:
                if value is not None:
                    with torch.no_grad():
                        self._tensors[change.holder].copy_(value)
            else:
                _put_value(self._walk.holders[change.holder], change.name, value)
        self._marks = self._marks_now()

    def _accept(self, change: Change) -> None:
        walk, number = self._walk, change.holder
        if change.is_tensor:
            if number in self._kept:
                self._kept[number] = self._tensors[number].detach().clone()
        elif row := walk.rows.get(number):
            if change.name in row.names:
                values = list(self._read[number])
                values[row.names.index(change.name)] = change.after
                self._read[number] = (*values[:-1], values[0])
        elif isinstance(place := walk.holders[number].value, Place):
            self._read[number] = place.read()
        else:
            _put_value(Holder(self._read[number], -1, None), change.name, change.after)


class StateOfSteps:
    """What forward steps change of models before they call them.

    Args:
        is_inside: whether the forward of what is around a language model runs before that is
            called (vision towers): its own changes are no forward step's.
    """

    def __init__(self, state: Callable[[], ModelState], *, is_inside: bool) -> None:
        self._make, self._is_inside = state, is_inside
        self._state: ModelState | None = None
        self._early: list[Change] = []
        self._lost: Change | None = None
        self._starts = self._others_wait = False

    def called(self, *_: Any) -> None:
        if self._is_inside and self._starts and self._state is not None and not self._early:
            self._early = self._state.changes()

    def own(self) -> contextlib.AbstractContextManager[None]:
        if self._state is None or not self._starts:
            return contextlib.nullcontext()
        return self._state.own()

    def swap(self, kept: list[Change] | None, entering: bool) -> list[Change] | None:
        """One for `SuspendedStep`: keeps what a step has changed before its call, puts it back,
        and repeats it when the step goes on."""
        if entering:
            self._starts = kept is None
            if self._starts and self._state is None:
                self._state = self._make()
            if kept and self._state is not None:
                self._state.repeat(kept)
            return kept
        if not self._starts or self._state is None:
            return kept
        self._starts = False
        changes = [*self._early, *self._state.changes(inner=self._is_inside)]
        self._early = []
        if self._is_inside:  # what is around has run on the way: a tower's changes are its own
            self._state.accept_others(changes)
        if changes and self._others_wait:
            self._put_back(changes, self._state)
        self._others_wait = True
        return changes

    def _put_back(self, changes: list[Change], state: ModelState) -> None:
        """Others are suspended that had called the model as it was."""
        with contextlib.suppress(Exception):  # what cannot be written
            state.put_back(changes)
        remaining = [*state.changes(inner=self._is_inside), None]
        self._lost = next((change for change in changes if change.is_lost), remaining[0])

    def check(self, changes: list[Change] | None) -> None:
        """Raises what is in the way of a step that has changed this.

        Raises:
            CannotShare: naming it; the stock schedule can go on.
            UserError: it cannot be put back for the microbatches before.
        """
        if self._state is not None and self._lost is not None:
            raise refused(STATE_LOST, self._state.path(self._lost))
        if self._state is not None and changes:
            raise refused(SWITCHED, self._state.path(changes[0]))

    def forget(self) -> None:
        """Drops what was there, when all steps have called their models and changed nothing."""
        self._state = None


def outer_modules(places: Iterable[Place], models: Sequence[Any]) -> list[Any]:
    """Modules of a trainer's own that hold a model, of those that its forward step can reach."""
    ids = {*map(id, models)}
    values = itertools.chain.from_iterable(place.read().values() for place in places)
    modules = (v for v in values if isinstance(v, nn.Module) and id(v) not in ids)
    return [module for module in modules if _holds_model(module, ids)]


def _holds_model(module: Any, models: set[int]) -> bool:
    level = [module]
    for _ in range(MOST_WRAPPERS):
        level = [m for parent in level[:MOST_COPIED] for m in parent._modules.values() if m]
        if any(id(module) in models for module in level):
            return True
    return False


def _put_value(to: Holder, name: Any, value: Any) -> None:
    holder = to.value
    if isinstance(holder, Place):
        if value is not _MISSING:
            holder.write(name, value)
    elif isinstance(holder, collections.deque | list):
        holder.clear()
        holder.extend(value)
    elif isinstance(holder, set):
        holder.clear()
        holder.update(value)
    elif isinstance(holder, types.MappingProxyType):  # of a class
        delattr(to.kind, name) if value is _MISSING else setattr(to.kind, name, value)  # type: ignore[arg-type]
    elif value is _MISSING:
        holder.pop(name, None)
    elif name in OF_MODULE and to.kind is not None:  # handles of hooks know the dict itself
        holder[name].clear()
        holder[name].update(value)
    else:
        holder[name] = value


def _data_pointers(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [*map(Tensor.data_ptr, tensors)]  # in C
    except RuntimeError:
        return [*map(_data_pointer, tensors)]


def _data_pointer(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # of a tensor that is made of others
        return 0


def _sample(tensor: Tensor) -> bytes:
    try:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: 1 + flat.numel() // SAMPLED].contiguous().cpu()
        return sample.view(torch.uint8).numpy().tobytes() if sample.numel() else b""
    except (RuntimeError, TypeError):  # sparse, or quantised
        return b""


def _is_same_value(before: Any, now: Any, depth: int = MOST_DEPTH) -> bool:
    """Whether two values do the same for a model."""
    if before is now:
        return True
    if type(before) is not type(now) or depth == 0:
        return False
    try:
        return _same_kind(before, now, depth - 1)
    except Exception:  # whatever a trainer's classes do when they are compared
        logger.debug("a %s cannot be compared", type(now).__name__, exc_info=True)
        return False


def _same_kind(before: Any, now: Any, depth: int) -> bool:
    if isinstance(before, Tensor):
        return _same_tensor(before, now)
    if isinstance(before, nn.Module):
        return False
    if isinstance(before, float):
        return before == now or (before != before and now != now)
    if isinstance(before, np.ndarray):
        return before.dtype == now.dtype and np.array_equal(before, now)
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(
            _is_same_value(before[n], now[n], depth) for n in now
        )
    if isinstance(before, tuple | list | collections.deque):
        pairs = zip(before, now, strict=False)
        return len(before) == len(now) and all(
            _is_same_value(was, by_now, depth) for was, by_now in pairs
        )
    if isinstance(before, functools.partial | types.MethodType | types.FunctionType):
        return _is_same_value(_function_parts(before), _function_parts(now), depth)
    if holds_state(before):
        return _is_same_value(members_of(before), members_of(now), depth)
    return bool(before == now)


def _same_tensor(before: Tensor, now: Tensor) -> bool:
    if before.requires_grad or now.requires_grad or before.data_ptr() != now.data_ptr():
        return False
    return (before.shape, before.stride(), before.dtype) == (now.shape, now.stride(), now.dtype)


def _function_parts(function: Any) -> tuple[Any, ...]:
    """What a function does: one that is made anew from the same code and values does the same."""
    if isinstance(function, functools.partial):
        return function.func, function.args, function.keywords
    if isinstance(function, types.MethodType):
        return function.__func__, function.__self__
    return (
        function.__code__,
        function.__defaults__,
        function.__kwdefaults__,
        closure(function).read(),
    )
